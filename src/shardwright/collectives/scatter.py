"""Reduce-scatters one chunk: every rank has a piece for each rank, and gets the sum of its own.

The mirror of the all-gather::

    node 0                                 node 1
    rank 0 ┐ shared memory of node 0       rank 2 ┐      (1) inside of the node: each rank sums a part of what
    rank 1 ┘                               rank 3 ┘          the node has for others, and its own piece
       │                                      │
       └── sum for rank 2 ────────────────▶ rank 2       (2) between nodes, all ranks at the same time

Sums are always taken in the same order: first over the ranks of a node, ascending, then over the nodes.
"""

from collections.abc import Callable, Iterator

from shardwright.collectives.gather import SpanOf
from shardwright.collectives.node_view import NodeView
from shardwright.collectives.steps import Arrived, Left, Memory, Row, Span

__all__ = ["Scatter"]


class Scatter:
    """Writes the steps of one rank."""

    def __init__(
        self,
        view: NodeView,
        row: Row,
        *,
        depth: int,
        shared: Callable[[int, int, int, int, int], Span],
    ):
        self._view = view
        self._row = row
        self._depth = depth
        self._shared = shared
        self._arrivals: dict[int, list[Arrived]] = {}
        self._departures: dict[int, list[Left]] = {}

    def begin(self, chunk: int, pieces: SpanOf) -> None:
        """Sends this rank's sums for other nodes, and says where their sums go.

        Nobody may read this part of the shared memory any more: see `reuse`.
        """
        view, row = self._view, self._row
        for handler in view.peers:
            for owner, start, stop in self._handled_by(handler, chunk):
                row.copy(pieces(owner, start, stop), self._shared(chunk, view.rank, owner, start, stop))
        row.tell("scatter: staged", chunk)
        row.wait(self._departures.pop(chunk - self._depth, []))
        self._arrivals[chunk] = [
            row.receive(handler, self._partial(chunk, node, start, stop))
            for node in reversed(view.others)
            for handler in view.ranks_of(node)
            for owner, start, stop in view.lane(handler, view.node, chunk)
            if owner == view.rank
        ]
        if view.others:
            row.hear("scatter: staged", chunk)
            self._departures[chunk] = [
                row.send(owner, self._sum_here(chunk, owner, start, stop, pieces))
                for node in view.others
                for owner, start, stop in view.lane(view.rank, node, chunk)
            ]

    def end(self, chunk: int, pieces: SpanOf, output: Span) -> None:
        """Sums up this rank's piece."""
        view, row = self._view, self._row
        size = output.num_elements
        if not view.others:
            row.hear("scatter: staged", chunk)
            row.combine(self._contributions(chunk, view.rank, 0, size, pieces), output)
            row.tell("scatter: read", chunk)
            return
        own = self._sum_here(chunk, view.rank, 0, size, pieces)
        row.tell("scatter: read", chunk)
        row.wait(self._arrivals.pop(chunk))
        row.combine(
            [
                own if node == view.node else self._partial(chunk, node, 0, size)
                for node in range(len(view.topology.nodes))
            ],
            output,
        )

    def finish(self) -> None:
        """Waits until all has left that was sent."""
        for departures in self._departures.values():
            self._row.wait(departures)

    def reuse(self, chunk: int) -> None:
        """Waits until nobody of the node reads a chunk any more."""
        if chunk >= 0:
            self._row.hear("scatter: read", chunk)

    def _handled_by(self, handler: int, chunk: int) -> Iterator[tuple[int, int, int]]:
        """What a rank of the node sums up: its own piece, and its lanes of what other nodes get."""
        yield handler, 0, self._view.size(chunk, handler)
        for node in self._view.others:
            yield from self._view.lane(handler, node, chunk)

    def _sum_here(self, chunk: int, owner: int, start: int, stop: int, pieces: SpanOf) -> Span:
        """Sums up what the ranks of the node have for a rank, and says where the sum is."""
        sources = self._contributions(chunk, owner, start, stop, pieces)
        if len(sources) == 1:
            return sources[0]
        total = self._scratch(chunk, owner, start, stop)
        self._row.combine(sources, total)
        return total

    def _contributions(self, chunk: int, owner: int, start: int, stop: int, pieces: SpanOf) -> list[Span]:
        return [
            pieces(owner, start, stop)
            if rank == self._view.rank
            else self._shared(chunk, rank, owner, start, stop)
            for rank in self._view.here
        ]

    def _partial(self, chunk: int, node: int, start: int, stop: int) -> Span:
        """Where the sum goes that comes from another node for this rank."""
        return self._scratch(chunk, self._view.topology.num_ranks + node, start, stop)

    def _scratch(self, chunk: int, place: int, start: int, stop: int) -> Span:
        places = self._view.topology.num_ranks + len(self._view.topology.nodes)
        base = (chunk % self._depth * places + place) * self._view.width
        return Span(Memory.SCRATCH, base + start, base + stop)
