"""Measures the cost of a collective's steps, on CPUs and on accelerators.

All ranks run the same step at the same time, as in a collective: they share cores, memory and links. The
slowest rank counts. For steps, the fastest of several attempts counts, because disturbances only add. Whole
collectives, ours and gloo's, are timed in alternation, and the median counts: busy cores are part of their
cost.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.collectives.choose import COLLECTIVES
from shardwright.collectives.choose_on_devices import why_not_hierarchical
from shardwright.collectives.prices import DEFAULT_PRICES, Curve, DevicePrices, Line, Prices
from shardwright.collectives.steps import Memory, Routine, Row, Span
from shardwright.comm.collectives.communicator import Communicator
from shardwright.comm.collectives.device_collectives import DeviceCollectives
from shardwright.comm.collectives.reduction import run_stock

_ROUNDS = 5
_SMALL, _LARGE = 16, 256 * 1024  # elements of 4 bytes
_COUNTS = (_SMALL, 1024, 8 * 1024, 64 * 1024, 512 * 1024)  # of a rank, where whole collectives are timed
# Messages that take longer are halved until they do not.
_LONGEST_S = 0.1
# Work on memory walks through so much of it, as a collective does: what a core has in its cache costs less.
_WALK = 8 * 2**20
_PIECE = 64 * 1024
_ENOUGH_S = 0.008
# Ranks come out of a barrier one after the other: of few calls, that would be a large part.
_ENOUGH_COMPARED_S = 0.03
_LEAST_SHARE = 0.05
_MOST_CALLS = 200

_Call = Callable[[], object]


def measure_prices(group: Communicator) -> Prices:
    """Prices of a group; collective over its ranks, which all get the same.

    It takes some seconds.
    """
    watch = _StepsStopwatch(group)
    topology, before = group.topology, group.prices
    ways = _ways_between_nodes(group)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    steps = Prices(
        own={},
        copy=watch.memory(lambda source, target: target.copy_(source), reads=1),
        combine=watch.memory(lambda source, target: torch.add(source, target, out=target), reads=2),
        note_s=watch.notes(),
        message=watch.messages(ways) if ways else DEFAULT_PRICES.message,
        local_message=watch.messages(_ways_inside_of_nodes(group)) if ways else DEFAULT_PRICES.local_message,
        gloo={},
        source=f"measured on {topology}, {when}",
    )
    group.use(steps)
    try:
        compared = {collective: watch.compare(collective) for collective in COLLECTIVES}
    finally:
        group.use(before)
    return replace(
        steps,
        own={collective: own for collective, (own, _) in compared.items()},
        gloo={collective: gloo for collective, (_, gloo) in compared.items()},
    )


def _ways_between_nodes(group: Communicator) -> dict[int, int]:
    """A rank of the next node for each rank; empty where there is one node."""
    nodes = group.topology.nodes
    if len(nodes) == 1:
        return {}
    following = [*nodes[1:], nodes[0]]
    return {
        rank: there[number % len(there)]
        for here, there in zip(nodes, following, strict=True)
        for number, rank in enumerate(here)
    }


def _ways_inside_of_nodes(group: Communicator) -> dict[int, int]:
    """The next rank of the same node for each rank that is not alone there."""
    return {
        rank: node[(number + 1) % len(node)]
        for node in group.topology.nodes
        for number, rank in enumerate(node)
        if len(node) > 1
    }


class _Stopwatch:
    """Times what all ranks of a group do."""

    def __init__(self, everyone: dist.ProcessGroup, device: torch.device):
        self._everyone = everyone
        self._device = device

    def line(self, call_of: Callable[[int], tuple[_Call, int]], *, small: int, large: int) -> Line:
        """Through the times of a small and a large call; `call_of` makes them, and says their bytes."""
        call, small_bytes = call_of(small)
        small_s = self._seconds(call)
        call, large_bytes = call_of(large)
        while large > 4 * small and self._slowest(call, 1) > _LONGEST_S:
            large //= 2
            call, large_bytes = call_of(large)
        return line_through([small_s, self._seconds(call)], [small_bytes, large_bytes])

    def sides(self, collective: str, part: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """The input and the output of a collective, with so many elements in a rank's part."""
        piece, whole = self._zeros(part), self._zeros(part * num_ranks)
        found = {"all_gather": (piece, whole), "reduce_scatter": (whole, piece)}
        return found.get(collective, (whole, whole))

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, device=self._device)

    def _seconds(self, call: _Call) -> float:
        """Of a call on the slowest rank: the fastest of some rounds."""
        number = self._number_of(call)
        return min(self._slowest(call, number) for _ in range(_ROUNDS))

    def _number_of(self, call: _Call, enough_s: float = _ENOUGH_S) -> int:
        """So many calls that they take long enough to be timed; the first ones connect."""
        return min(_MOST_CALLS, max(1, int(enough_s / self._slowest(call, 2))))

    def _slowest(self, call: _Call, number: int) -> float:
        self._largest(0.0)  # all ranks are here
        self._settle()
        start = time.perf_counter()
        for _ in range(number):
            call()
        self._settle()
        return self._largest((time.perf_counter() - start) / number)

    def _largest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self._device)
        run_stock(self._everyone, "all_reduce", found, found, dist.ReduceOp.MAX)
        return found.item()

    def _settle(self) -> None:
        """Waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


class _StepsStopwatch(_Stopwatch):
    """Times the steps of collectives on CPUs, and whole ones."""

    def __init__(self, group: Communicator):
        super().__init__(group.gloo, torch.device("cpu"))
        self._group = group

    def memory(self, do: Callable[[Tensor, Tensor], object], *, reads: int) -> Line:
        """A line for work on memory, by the bytes that it reads."""
        source, target = torch.zeros(_WALK), torch.zeros(_WALK)
        starts = range(0, _WALK, _PIECE)

        def walk(size: int) -> None:
            for start in starts:
                do(source[start : start + size], target[start : start + size])

        times = [self._seconds(partial(walk, size)) / len(starts) for size in (_SMALL, _PIECE)]
        return line_through(times, [4 * reads * size for size in (_SMALL, _PIECE)])

    def notes(self) -> float:
        """Seconds until all ranks of a node have heard one another."""
        group, number = self._group, 20
        row = Row(group.rank, group.topology.local(group.rank))
        for turn in range(number):
            row.tell("turn", turn)
            row.hear("turn", turn)
        routine, empty = Routine.of(row.steps), torch.zeros(0)
        return self._seconds(partial(group.run_routine, "probe of notes", routine, empty, empty)) / number

    def messages(self, ways: Mapping[int, int]) -> Line:
        """A line for messages that go all at once, by the bytes of the busiest node."""
        group = self._group
        if not ways:
            return DEFAULT_PRICES.local_message

        most = max(sum(rank in ways for rank in node) for node in group.topology.nodes)

        def call_of(count: int) -> tuple[_Call, int]:
            row = Row(group.rank, ())
            arrivals = [
                row.receive(source, Span(Memory.OUTPUT, number * count, (number + 1) * count))
                for number, (source, target) in enumerate(ways.items())
                if target == group.rank
            ]
            if group.rank in ways:
                row.send(ways[group.rank], Span(Memory.INPUT, 0, count))
            row.wait(arrivals)
            data, output = torch.zeros(count), torch.zeros(count * len(ways))
            call = partial(group.run_routine, "probe of messages", Routine.of(row.steps), data, output)
            return call, 4 * most * count

        return self.line(call_of, small=_SMALL, large=_LARGE)

    def compare(self, collective: str) -> tuple[Curve, Curve]:
        """The overhead of one of our collectives over its steps, and the time of gloo's, by size."""
        group = self._group
        num_ranks = group.topology.num_ranks
        pieces = num_ranks if collective in ("all_reduce", "broadcast") else 1
        own, gloo = [], []
        for count in _COUNTS:
            data, output = self.sides(collective, count, num_ranks)
            calls: list[_Call] = [
                partial(group.run, collective, data, output),
                partial(run_stock, group.gloo, collective, data, output),
            ]
            if count > _SMALL and any(self._slowest(call, 1) > _LONGEST_S for call in calls):
                break
            numbers = [self._number_of(call, _ENOUGH_COMPARED_S) for call in calls]
            rounds = [
                [self._slowest(call, number) for call, number in zip(calls, numbers, strict=True)]
                for _ in range(_ROUNDS)
            ]
            own_s, gloo_s = map(statistics.median, zip(*rounds, strict=True))
            num_bytes = 4 * num_ranks * count
            own.append((num_bytes, own_s - group.choice(collective, count * pieces, 4).seconds))
            gloo.append((num_bytes, gloo_s))
        return Curve(tuple(own)), Curve(tuple(gloo))


def line_through(times: list[float], sizes: list[int]) -> Line:
    """A line through two points: the small one has next to no bytes."""
    (small_s, large_s), (small, large) = times, sizes
    # Where the machine was busy with something else, the large one may seem to be no slower.
    return Line(small_s, (large - small) / max(large_s - small_s, _LEAST_SHARE * large_s))


_SMALL_BYTES, _LARGE_BYTES = 4 * 1024, 256 * 2**20
_ITEMSIZE = 4


def measure_device_prices(
    group: DeviceCollectives, device: torch.device, *, largest: int = _LARGE_BYTES
) -> DevicePrices:
    """Prices of a group on accelerators; collective over its ranks, which all get the same."""
    watch = _DeviceStopwatch(group, device, largest)
    hops = any(not why_not_hierarchical(collective, group.topology) for collective in COLLECTIVES)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return DevicePrices(
        everyone=watch.lines(group.everyone),
        across=watch.lines(group.across) if hops else {},
        inside=watch.lines(group.inside) if hops else {},
        reorder=watch.line(watch.reordering, small=_SMALL_BYTES, large=largest),
        source=f"measured on {device.type} devices of {group.topology}, {when}",
    )


class _DeviceStopwatch(_Stopwatch):
    """Times collectives of groups on accelerators."""

    def __init__(self, group: DeviceCollectives, device: torch.device, largest: int):
        super().__init__(group.everyone, device)
        self._most_bytes = largest

    def lines(self, group: dist.ProcessGroup) -> dict[str, Line]:
        def line(collective: str) -> Line:
            def call_of(num_bytes: int) -> tuple[_Call, int]:
                count = max(1, num_bytes // _ITEMSIZE // group.size())
                data, output = self.sides(collective, count, group.size())
                return partial(run_stock, group, collective, data, output), _ITEMSIZE * count * group.size()

            return self.line(call_of, small=_SMALL_BYTES, large=self._most_bytes)

        return {collective: line(collective) for collective in COLLECTIVES}

    def reordering(self, num_bytes: int) -> tuple[_Call, int]:
        """A copy as an all-gather makes it."""
        data = self._zeros(num_bytes // _ITEMSIZE).view(8, 4, -1)
        target = torch.empty_like(data).view(4, 8, -1)
        return lambda: target.copy_(data.transpose(0, 1)), num_bytes
