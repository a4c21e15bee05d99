"""Chooses the algorithm of a collective: the cheapest rows for this group and size."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from shardwright.collectives.algorithms import (
    all_gather,
    all_reduce,
    all_reduce_at_once,
    broadcast,
    reduce_scatter,
)
from shardwright.collectives.price import price
from shardwright.collectives.prices import Prices
from shardwright.collectives.steps import Step
from shardwright.collectives.topology import Topology
from shardwright.quantities import format_bytes, format_seconds

__all__ = ["BY_RANK", "COLLECTIVES", "GLOO", "OWN", "ROOM_BYTES", "Candidate", "Choice", "choose", "steps_of"]

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
        source: where the prices are from.
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
        topology: which ranks share a node.
        itemsize: bytes of an element.
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
