"""Chooses the algorithm of a collective: the cheapest rows for this group and size.

::

    rank 0   | copy | send ...              each rank does its steps one after the other;
    node 0          [ chunk 0 ][ chunk 1 ]  the messages of a node share its link, in either direction
    rank 2                     | hear | copy |
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from shardwright.collectives.algorithms import (
    all_gather,
    all_reduce,
    all_reduce_at_once,
    broadcast,
    reduce_scatter,
)
from shardwright.collectives.prices import Prices
from shardwright.collectives.steps import (
    Arrived,
    Combine,
    Copy,
    Hear,
    Left,
    Receive,
    Routine,
    Send,
    Step,
    Tell,
    Topology,
)
from shardwright.errors import ScheduleError
from shardwright.quantities import format_bytes, format_seconds


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


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
GLOO = "gloo"
OWN = frozenset({"hierarchical", "flat", "at once"})

BY_RANK = ("all_gather", "reduce_scatter")
"""Those whose whole is made of a piece for each rank."""

ROOM_BYTES = 32 * 2**20
"""Shared memory of a node for one collective, at most."""

_CHUNK_BYTES = (64 * 1024, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
# So many chunks are played; what more of them take is proportional.
_FEW, _MANY = 4, 8
_ALIGNMENT = 16
# Of more ranks of which some share a node, all sending to all is hopeless, and takes long to price.
_MOST_FLAT_RANKS = 16
_LARGEST_AT_ONCE_BYTES = 256 * 1024
_NEAR_TIE = 1.15
_LEAST_S = 1e-6
# Gloo is taken where it is faster by more than measurements differ: it suffers more from busy cores.
_GLOO_MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to do a collective.

    Attributes:
        name: ``hierarchical`` where ranks of a node share memory, ``flat`` where none does, ``at once`` where
            all ranks of a node sum up everything, or `GLOO`; on accelerators ``hierarchical``, or ``nccl``.
        chunk: elements of a piece that go at once; 0 for all.
    """

    name: str
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest way, and why.

    Attributes:
        others: what the best of each other name should take.
        remark: why other ways cannot be taken, if so.
    """

    candidate: Candidate
    seconds: float
    others: dict[str, float]
    source: str
    remark: str = ""

    def reason(self, itemsize: int) -> str:
        """One line that says why.

        >>> Choice(Candidate("flat"), 1e-3, {"gloo": 2e-3}, "defaults").reason(4)
        'flat, 1.00 ms; gloo would take 2.00 ms (prices: defaults)'
        """
        chunk = self.candidate.chunk * itemsize
        how = f" in chunks of {format_bytes(chunk)}" if chunk else ""
        others = [f"{name} would take {format_seconds(s)}" for name, s in self.others.items()]
        if self.remark:
            others.append(self.remark)
        return (
            "; ".join([f"{self.candidate.name}{how}, {format_seconds(self.seconds)}", *others])
            + f" (prices: {self.source})"
        )


def choose(
    collective: str,
    topology: Topology,
    *,
    count: int,
    itemsize: int,
    prices: Prices,
    source: int = 0,
    ways: Collection[str] | None = None,
) -> Choice:
    """The cheapest way to do a collective."""
    pricing = _Pricing(collective, topology, itemsize, prices, source)
    found: dict[str, list[tuple[float, Candidate]]] = {}
    for candidate in _candidates(collective, topology, count, itemsize, prices):
        if ways is None or candidate.name in ways:
            seconds = pricing.seconds(candidate, count)
            found.setdefault(candidate.name, []).append((seconds, candidate))
    best = {name: _fewest_chunks(of_name) for name, of_name in found.items()}
    seconds, chosen = min(
        best.values(), key=lambda row: row[0] * (_GLOO_MARGIN if row[1].name == GLOO else 1)
    )
    others = {name: row[0] for name, row in best.items() if name != chosen.name}
    return Choice(chosen, seconds, others, prices.source)


def _fewest_chunks(found: Sequence[tuple[float, Candidate]]) -> tuple[float, Candidate]:
    """Of ways that take about as long, the one with the largest chunks: waits cost more than they seem to."""
    least_s = min(seconds for seconds, _ in found)
    near = [row for row in found if row[0] <= _NEAR_TIE * least_s]
    return max(near, key=lambda row: row[1].chunk or math.inf)


def steps_of(
    collective: str, candidate: Candidate, topology: Topology, rank: int, *, count: int, source: int = 0
) -> Sequence[Step]:
    """The row of one rank for a way that was chosen, other than `GLOO`."""
    nodes = topology.flat() if candidate.name == "flat" else topology
    chunk = candidate.chunk or max(count, _ALIGNMENT)
    if candidate.name == "at once":
        return all_reduce_at_once(nodes, rank, count=count)
    if collective == "broadcast":
        return broadcast(nodes, rank, count=count, chunk=chunk, source=source)
    functions: dict[str, Callable[..., list[Step]]] = {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
    }
    return functions[collective](nodes, rank, count=count, chunk=chunk)


def _candidates(
    collective: str, topology: Topology, count: int, itemsize: int, prices: Prices
) -> Iterator[Candidate]:
    share = any(len(node) > 1 for node in topology.nodes)
    if share or topology.num_ranks == 1:
        room = ROOM_BYTES // _places(collective, topology)
        sizes = {min(room, size) // itemsize // _ALIGNMENT * _ALIGNMENT for size in _CHUNK_BYTES}
        for chunk in sorted(max(_ALIGNMENT, size) for size in sizes):
            yield Candidate("hierarchical", chunk)
            if chunk >= count:
                break
    if len(topology.nodes) > 1 and not (share and topology.num_ranks > _MOST_FLAT_RANKS):
        sizes = {size // itemsize for size in _CHUNK_BYTES}
        for chunk in sorted(sizes):
            yield Candidate("flat", chunk)
            if chunk >= count:
                break
    at_once = count * itemsize * topology.num_ranks
    if collective == "all_reduce" and len(topology.nodes) == 1 and at_once <= _LARGEST_AT_ONCE_BYTES:
        yield Candidate("at once")
    if collective in prices.gloo:
        yield Candidate(GLOO)


def _places(collective: str, topology: Topology) -> int:
    """How many pieces have room in the memory of a node at once; the largest node counts for all."""
    most_here, num_ranks = max(len(node) for node in topology.nodes), topology.num_ranks
    return {
        "all_gather": 2 * num_ranks,
        "reduce_scatter": 2 * most_here * num_ranks,
        "all_reduce": 2 * (most_here + 1) * num_ranks,
        "broadcast": 2,
    }[collective]


@dataclass(frozen=True, slots=True)
class _Pricing:
    """What ways to do a collective take, by size.

    Attributes:
        source: the rank that a broadcast starts from.
    """

    collective: str
    topology: Topology
    itemsize: int
    prices: Prices
    source: int

    def seconds(self, candidate: Candidate, count: int) -> float:
        """Of a collective with pieces of so many elements."""
        collective, prices = self.collective, self.prices
        pieces = self.topology.num_ranks if collective in BY_RANK else 1
        num_bytes = count * self.itemsize * pieces
        if candidate.name == GLOO:
            return prices.gloo[collective].seconds(num_bytes)
        on_top = prices.own[collective].seconds(num_bytes) if collective in prices.own else 0.0
        return max(on_top + self._steps_s(candidate, count), _LEAST_S)

    def _steps_s(self, candidate: Candidate, count: int) -> float:
        """Of the steps alone; of many chunks, few are played."""
        pieces = self.topology.num_ranks if self.collective == "all_reduce" else 1
        at_once = (candidate.chunk or count or 1) * pieces
        num_chunks = count / at_once
        if num_chunks <= _MANY:
            return self._played(candidate, count)
        few, many = (self._played(candidate, number * at_once) for number in (_FEW, _MANY))
        return many + (many - few) / (_MANY - _FEW) * (num_chunks - _MANY)

    def _played(self, candidate: Candidate, count: int) -> float:
        topology = self.topology
        rows = [
            steps_of(self.collective, candidate, topology, rank, count=count, source=self.source)
            for rank in range(topology.num_ranks)
        ]
        return price(topology, rows, itemsize=self.itemsize, prices=self.prices)


# Objects are gathered in another size each time.
_MOST_ROUTINES = 512


class Chooser:
    """Chooses for one rank; all ranks of the group make the same choices."""

    def __init__(self, topology: Topology, rank: int, prices: Prices):
        self.prices = prices
        self._topology = topology
        self._rank = rank
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._routines: OrderedDict[tuple[object, ...], Routine] = OrderedDict()

    def choice(
        self, collective: str, count: int, itemsize: int, ways: Collection[str] | None = None
    ) -> Choice:
        """The algorithm for a collective of this size, and why."""
        key = (collective, size_class(count), itemsize, None if ways is None else frozenset(ways))
        if key not in self._choices:
            self._choices[key] = choose(
                collective,
                self._topology,
                count=size_class(count),
                itemsize=itemsize,
                prices=self.prices,
                ways=ways,
            )
        return self._choices[key]

    def own_choice(self, collective: str, count: int, itemsize: int) -> Choice:
        return self.choice(collective, count, itemsize, OWN)

    def routine(self, choice: Choice, collective: str, count: int, source: int) -> Routine:
        key = (choice.candidate, collective, count, source)
        if key in self._routines:
            self._routines.move_to_end(key)
            return self._routines[key]
        routine = Routine.of(
            steps_of(collective, choice.candidate, self._topology, self._rank, count=count, source=source)
        )
        self._routines[key] = routine
        if len(self._routines) > _MOST_ROUTINES:
            self._routines.popitem(last=False)
        return routine


def size_class(count: int) -> int:
    """Sizes are chosen for in classes, two for each doubling; this is the largest of a class.

    >>> [size_class(count) for count in (0, 3, 100, 1000)]
    [1, 3, 128, 1024]
    """
    step = 1 << max(0, count.bit_length() - 2)
    return max(1, -(-count // step) * step)
