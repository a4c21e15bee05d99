"""All-gathers one chunk: every rank has one piece, and gets the pieces of all.

::

    node 0                              node 1
    rank 0 ── piece 0 ────────────────▶ rank 2      (1) between nodes, all ranks of a node at the same time
    rank 1 ── piece 1 ────────────────▶ rank 3
       │ shared memory of node 0           │
       ▼                                   ▼
    0 1 2 3 copied out by each rank     0 1 2 3     (2) inside of the node; what came is where it belongs

Each byte enters a node once: (p - k) / p of the whole for p ranks, k of them on the node. No algorithm sends
fewer.
"""

from collections.abc import Callable

from shardwright.collectives.node_view import NodeView
from shardwright.collectives.steps import Arrived, Row, Span

__all__ = ["Gather"]

SpanOf = Callable[[int, int, int], Span]
"""Where elements `start` to `stop` of the piece of a rank are: called with the rank, start and stop."""


class Gather:
    """Writes the steps of one rank."""

    def __init__(
        self,
        view: NodeView,
        row: Row,
        *,
        shared: Callable[[int, int, int, int], Span],
    ):
        self._view = view
        self._row = row
        self._shared = shared
        self._arrivals: dict[int, list[Arrived]] = {}

    def begin(self, chunk: int, own: Span, output: SpanOf) -> None:
        """Sends this rank's piece, and says where those of others go.

        Nobody may read this part of the shared memory any more: see `reuse`.
        """
        view, row = self._view, self._row
        if view.peers:
            row.copy(own, self._shared(chunk, view.rank, 0, own.num_elements))
            row.tell("gather: staged", chunk)
        for node in view.others:
            for peer in view.ranks_of(node):
                for owner, start, stop in view.lane(peer, view.node, chunk):
                    if owner == view.rank:
                        row.send(peer, Span(own.memory, own.start + start, own.start + stop))
        self._arrivals[chunk] = [
            row.receive(
                owner,
                self._shared(chunk, owner, start, stop) if view.peers else output(owner, start, stop),
            )
            for node in reversed(view.others)
            for owner, start, stop in view.lane(view.rank, node, chunk)
        ]
        row.copy(own, output(view.rank, 0, own.num_elements))

    def end(self, chunk: int, output: SpanOf) -> None:
        """Waits for the pieces of others and puts them where they are to be."""
        view, row = self._view, self._row
        for peer in view.peers:
            row.hear("gather: staged", chunk, [peer])
            self._copy_out(chunk, peer, output)
        row.wait(self._arrivals.pop(chunk))
        if view.peers and view.others:
            row.tell("gather: came", chunk)
            row.hear("gather: came", chunk)
            for node in view.others:
                for owner in view.ranks_of(node):
                    self._copy_out(chunk, owner, output)
        row.tell("gather: read", chunk)

    def reuse(self, chunk: int) -> None:
        """Waits until nobody of the node reads a chunk any more."""
        if chunk >= 0:
            self._row.hear("gather: read", chunk)

    def _copy_out(self, chunk: int, owner: int, output: SpanOf) -> None:
        size = self._view.size(chunk, owner)
        self._row.copy(self._shared(chunk, owner, 0, size), output(owner, 0, size))
