"""All-gathers several tensors into memory shared by the ranks of a node.

::

    node 0                                      node 1
    rank 0 ── pieces 0 ──────────────────────▶  memory of node 1
    rank 1 ── pieces 1 ──────────────────────▶  0 1 2 3 of the first tensor, 0 1 2 3 of the second, ...

Each byte enters a node once, and stays where it arrives: nothing is copied inside a node except each rank's
own pieces.
"""

from collections.abc import Sequence
from itertools import accumulate

from shardwright.collectives.node_view import NodeView
from shardwright.collectives.steps import Memory, Row, Span, Step
from shardwright.collectives.topology import Topology

__all__ = ["gather_to_nodes"]


def gather_to_nodes(topology: Topology, rank: int, *, pieces: Sequence[int]) -> tuple[Step, ...]:
    view = NodeView(topology, rank, width=max(pieces, default=0), size=lambda tensor, _: pieces[tensor])
    row = Row(rank, view.here)
    starts = list(accumulate(pieces, initial=0))
    arrivals = []

    def place(tensor: int, owner: int, start: int, stop: int) -> Span:
        first = starts[tensor] * topology.num_ranks + owner * pieces[tensor]
        return Span(Memory.SHARED, first + start, first + stop)

    for tensor, size in enumerate(pieces):
        for node in view.others:
            for peer in view.ranks_of(node):
                for owner, start, stop in view.lane(peer, view.node, tensor):
                    if owner == rank:
                        row.send(peer, Span(Memory.INPUT, starts[tensor] + start, starts[tensor] + stop))
        arrivals += [
            row.receive(owner, place(tensor, owner, start, stop))
            for node in reversed(view.others)
            for owner, start, stop in view.lane(rank, node, tensor)
        ]
        row.copy(Span(Memory.INPUT, starts[tensor], starts[tensor] + size), place(tensor, rank, 0, size))
    row.wait(arrivals)
    row.tell("gather to nodes: there", 0)
    row.hear("gather to nodes: there", 0)
    return tuple(row.steps)
