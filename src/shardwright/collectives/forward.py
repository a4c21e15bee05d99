"""Broadcasts one chunk: from node to node, and inside each node to all its ranks.

::

    node 0 (source)        node 1                 node 2
    rank 0 ─ half ───────▶ rank 2 ─ half ───────▶ rank 4      (1) all ranks of a node send and receive a part
    rank 1 ─ half ───────▶ rank 3 ─ half ───────▶ rank 5
       │                      │                      │
       ▼                      ▼                      ▼
    all copy it out of the memory of their node               (2)

Each node receives a chunk once and sends it once, while the next one arrives.
"""

from collections.abc import Iterator

from shardwright.collectives.parts import lane_of
from shardwright.collectives.steps import Arrived, Left, Memory, Row, Span
from shardwright.collectives.topology import Topology

__all__ = ["Forward"]


class Forward:
    """Writes the steps of one rank."""

    def __init__(self, topology: Topology, row: Row, *, source: int, width: int, depth: int):
        self._topology = topology
        self._row = row
        self._source = source
        self._width = width
        self._depth = depth
        self._here = topology.local(row.rank)
        first, num_nodes = topology.node_of[source], len(topology.nodes)
        chain = [topology.nodes[(first + step) % num_nodes] for step in range(num_nodes)]
        position = chain.index(self._here)
        self._before = chain[position - 1] if position else ()
        self._behind = chain[position + 1] if position + 1 < num_nodes else ()
        self._arrivals: dict[int, list[Arrived]] = {}
        self._departures: dict[int, list[Left]] = {}

    def begin(self, chunk: int, data: Span) -> None:
        """Says where this rank's part of a chunk goes; the source shows the node what it has."""
        row = self._row
        self._finish(chunk - self._depth)
        if row.rank == self._source and len(self._here) > 1:
            row.copy(data, self._staged(chunk, data))
        if row.rank == self._source or not self._before:
            row.tell("forward: here", chunk)
            return
        staged = self._staged(chunk, data)
        self._arrivals[chunk] = [
            row.receive(peer, Span(staged.memory, staged.start + start, staged.start + stop))
            for peer, start, stop in self._parts(self._before, self._here, data.num_elements)
        ]

    def end(self, chunk: int, data: Span) -> None:
        """Passes a chunk on, and takes it."""
        row = self._row
        if self._before:
            row.wait(self._arrivals.pop(chunk))
            row.tell("forward: here", chunk)
            row.hear("forward: here", chunk)
        else:
            row.hear("forward: here", chunk, [self._source])
        staged = self._staged(chunk, data)
        self._departures[chunk] = [
            row.send(peer, Span(staged.memory, staged.start + start, staged.start + stop))
            for peer, start, stop in self._parts(self._behind, self._here, data.num_elements)
        ]
        if row.rank != self._source:
            row.copy(staged, data)

    def finish(self) -> None:
        """Waits until all has left that was sent."""
        for chunk in sorted(self._departures):
            self._finish(chunk, reuse=False)

    def _finish(self, chunk: int, *, reuse: bool = True) -> None:
        """Waits until a chunk has left this rank, and until nobody of the node reads it any more."""
        if chunk in self._departures:
            self._row.wait(self._departures.pop(chunk))
            self._row.tell("forward: read", chunk)
            if reuse:
                self._row.hear("forward: read", chunk)

    def _staged(self, chunk: int, data: Span) -> Span:
        if len(self._here) == 1:
            return data
        base = chunk % self._depth * self._width
        return Span(Memory.SHARED, base, base + data.num_elements)

    def _parts(
        self, there: tuple[int, ...], here: tuple[int, ...], size: int
    ) -> Iterator[tuple[int, int, int]]:
        """What this rank sends to, or gets from, each rank of a node: (rank, start, stop)."""
        for _, start, stop in lane_of(1, size, here.index(self._row.rank), len(here)):
            for number, peer in enumerate(there):
                for _, begin, end in lane_of(1, size, number, len(there)):
                    if max(start, begin) < min(stop, end):
                        yield peer, max(start, begin), min(stop, end)
