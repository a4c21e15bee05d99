"""Prices the rows of a collective: replays the rows that ranks run, with prices.

::

    rank 0   | copy | send ...              each rank does its steps one after the other;
    node 0          [ chunk 0 ][ chunk 1 ]  the messages of a node share its link, in either direction
    rank 2                     | hear | copy |
"""

from collections import defaultdict
from collections.abc import Sequence

from shardwright.collectives.prices import Prices
from shardwright.collectives.steps import Arrived, Combine, Copy, Hear, Left, Receive, Send, Step, Tell
from shardwright.collectives.topology import Topology
from shardwright.errors import ScheduleError

__all__ = ["price"]


def price(topology: Topology, rows: Sequence[Sequence[Step]], *, itemsize: int, prices: Prices) -> float:
    """Seconds until all ranks are done, if they begin at the same time."""
    play = _Play(topology, rows, itemsize, prices)
    moved = True
    while moved:
        moved = False
        for rank in range(len(rows)):
            moved = play.advance(rank) or moved
    if any(position < len(row) for position, row in zip(play.position, rows, strict=True)):
        raise ScheduleError(f"the ranks wait for one another for ever: they stand at {play.position}.")
    return max(play.clock, default=0.0)


class _Play:
    def __init__(self, topology: Topology, rows: Sequence[Sequence[Step]], itemsize: int, prices: Prices):
        self.position = [0] * len(rows)
        self.clock = [0.0] * len(rows)
        self._topology = topology
        self._rows = rows
        self._itemsize = itemsize
        self._prices = prices
        self._told: list[list[float]] = [[] for _ in rows]
        self._arrivals: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._out_free = [0.0] * len(topology.nodes)
        self._in_free = [0.0] * len(topology.nodes)

    def advance(self, rank: int) -> bool:
        """Does the steps of a rank until one has to wait; says whether there were any."""
        row, begun = self._rows[rank], self.position[rank]
        while self.position[rank] < len(row):
            end = self._end_of(rank, row[self.position[rank]])
            if end is None:
                break
            self.clock[rank] = end
            self.position[rank] += 1
        return self.position[rank] > begun

    def _end_of(self, rank: int, step: Step) -> float | None:
        """When a step ends; None where it is not known yet."""
        now, prices = self.clock[rank], self._prices
        match step:
            case Copy(source, _):
                return now + prices.copy.seconds(source.num_elements * self._itemsize)
            case Combine(sources, target):
                num_bytes = len(sources) * target.num_elements * self._itemsize
                return now + prices.combine.seconds(num_bytes)
            case Send(peer, span):
                self._send(rank, peer, span.num_elements * self._itemsize)
                return now
            case Arrived(peer, count) | Left(peer, count):
                way = (peer, rank) if isinstance(step, Arrived) else (rank, peer)
                arrivals = self._arrivals[way]
                return max(now, arrivals[count - 1]) if len(arrivals) >= count else None
            case Tell():
                self._told[rank].append(now)
                return now
            case Hear(peer, count):
                told = self._told[peer]
                return max(now, told[count - 1] + prices.note_s) if len(told) >= count else None
            case Receive():
                return now

    def _send(self, rank: int, peer: int, num_bytes: int) -> None:
        source, target = self._topology.node_of[rank], self._topology.node_of[peer]
        if source == target:
            arrives = self.clock[rank] + self._prices.local_message.seconds(num_bytes)
            self._arrivals[rank, peer].append(arrives)
            return
        start = max(self.clock[rank], self._out_free[source], self._in_free[target])
        end = start + num_bytes / self._prices.message.Bps
        self._out_free[source] = self._in_free[target] = end
        self._arrivals[rank, peer].append(end + self._prices.message.alpha_s)
