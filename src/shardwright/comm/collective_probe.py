"""Measures the cost of a collective's steps, on CPUs and on accelerators.

All ranks run the same step at the same time, as in a collective: they share cores, memory and links. The
slowest rank counts. For steps, the fastest of several attempts counts, because disturbances only add. Whole
collectives, ours and gloo's, are timed in alternation, and the median counts: busy cores are part of their
cost.

As in `collective_probe`, all ranks run the same step at the same time, the slowest rank counts, and so does
the fastest of several attempts.
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
from shardwright.comm.collectives import device_collectives
from shardwright.comm.collectives.communicator import Communicator
from shardwright.comm.collectives.device_collectives import DeviceCollectives
from shardwright.comm.collectives.reduction import Reduction, run_gloo

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
_SUM = Reduction("SUM")


def measure_prices(group: Communicator) -> Prices:
    """Prices of a group; collective over its ranks, which all get the same.

    It takes some seconds.
    """
    watch = _Stopwatch(group)
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
    """Times what all ranks do."""

    def __init__(self, group: Communicator):
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

        def call_of(count: int) -> Callable[[], object]:
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
            return partial(group.run_routine, "probe of messages", Routine.of(row.steps), data, output)

        most = max(sum(rank in ways for rank in node) for node in group.topology.nodes)
        return self._line(call_of, pieces=most)

    def compare(self, collective: str) -> tuple[Curve, Curve]:
        """The overhead of one of our collectives over its steps, and the time of gloo's, by size."""
        group = self._group
        num_ranks = group.topology.num_ranks
        pieces = num_ranks if collective in ("all_reduce", "broadcast") else 1
        own, gloo = [], []
        for count in _COUNTS:
            calls = [self._own_call(collective, count), self._gloo_call(collective, count)]
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

    def _gloo_call(self, collective: str, count: int) -> Callable[[], object]:
        group = self._group
        part, whole = torch.zeros(count), torch.zeros(count * group.topology.num_ranks)
        data, output = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(
            collective, (whole, whole)
        )
        return partial(run_gloo, group.gloo, collective, data, output, _SUM, 0)

    def _own_call(self, collective: str, count: int) -> Callable[[], object]:
        group = self._group
        part, whole = torch.zeros(count), torch.zeros(count * group.topology.num_ranks)
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(group.all_gather, whole, part),
            "reduce_scatter": partial(group.reduce_scatter, part, whole),
            "all_reduce": partial(group.all_reduce, whole),
            "broadcast": partial(group.broadcast, whole, 0),
        }
        return calls[collective]

    def _line(self, call_of: Callable[[int], Callable[[], object]], *, pieces: int) -> Line:
        """A line through the times of a small and a large call."""
        large = self._bearable(call_of)
        times = [self._seconds(call_of(count)) for count in (_SMALL, large)]
        return line_through(times, [4 * pieces * count for count in (_SMALL, large)])

    def _bearable(self, call_of: Callable[[int], Callable[[], object]]) -> int:
        """Elements a piece for a large call that does not take too long."""
        large = _LARGE
        while large > 2 * _SMALL and self._slowest(call_of(large), 1) > _LONGEST_S:
            large //= 2
        return large

    def _seconds(self, call: Callable[[], object]) -> float:
        """Of a call on the slowest rank: the fastest of some rounds."""
        number = self._number_of(call)
        return min(self._slowest(call, number) for _ in range(_ROUNDS))

    def _number_of(self, call: Callable[[], object], enough_s: float = _ENOUGH_S) -> int:
        """So many calls that they take long enough to be timed."""
        return min(_MOST_CALLS, max(1, int(enough_s / self._slowest(call, 2))))

    def _slowest(self, call: Callable[[], object], number: int) -> float:
        self._group.gloo.barrier(dist.BarrierOptions()).wait()
        start = time.perf_counter()
        for _ in range(number):
            call()
        seconds = torch.tensor([(time.perf_counter() - start) / number], dtype=torch.float64)
        run_gloo(self._group.gloo, "all_reduce", seconds, seconds, Reduction("MAX"), 0)
        return seconds.item()


def line_through(times: list[float], sizes: list[int]) -> Line:
    """A line through two points: the small one has next to no bytes."""
    (small_s, large_s), (small, large) = times, sizes
    # Where the machine was busy with something else, the large one may seem to be no slower.
    return Line(small_s, (large - small) / max(large_s - small_s, _LEAST_SHARE * large_s))


_SMALL_BYTES, _LARGE_BYTES = 4 * 1024, 256 * 2**20
_ITEMSIZE = 4
# A call that takes longer is halved until it does not.
_CALLS = 10
_DEVICE_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


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
        reorder=watch.line(watch.reordering),
        source=f"measured on {device.type} devices of {group.topology}, {when}",
    )


class _DeviceStopwatch:
    """Times what all ranks do."""

    def __init__(self, group: DeviceCollectives, device: torch.device, largest: int):
        self._group = group
        self._largest = largest
        self._device = device

    def lines(self, group: dist.ProcessGroup) -> dict[str, Line]:
        return {collective: self.line(partial(self._call, group, collective)) for collective in COLLECTIVES}

    def line(self, call_of: Callable[[int], tuple[Callable[[], object], int]]) -> Line:
        """Through the times of a small and a large call."""
        call, small = call_of(_SMALL_BYTES)
        small_s = self._seconds(call)
        size = self._largest
        call, large = call_of(size)
        while size > 4 * _SMALL_BYTES and self._slowest(call, 1) > _LONGEST_S:
            size //= 2
            call, large = call_of(size)
        return line_through([small_s, self._seconds(call)], [small, large])

    def reordering(self, num_bytes: int) -> tuple[Callable[[], object], int]:
        """A copy as an all-gather makes it."""
        data = self._zeros(num_bytes // _ITEMSIZE).view(8, 4, -1)
        target = torch.empty_like(data).view(4, 8, -1)
        return lambda: target.copy_(data.transpose(0, 1)), num_bytes

    def _call(
        self, group: dist.ProcessGroup, collective: str, num_bytes: int
    ) -> tuple[Callable[[], object], int]:
        count = max(1, num_bytes // _ITEMSIZE // group.size())
        part, whole = self._zeros(count), self._zeros(count * group.size())
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(device_collectives.all_gather, group, whole, part),
            "reduce_scatter": partial(device_collectives.reduce_scatter, group, part, whole, _DEVICE_SUM),
            "all_reduce": partial(device_collectives.all_reduce, group, whole, _DEVICE_SUM),
            "broadcast": partial(device_collectives.broadcast, group, whole, 0),
        }
        return calls[collective], _ITEMSIZE * whole.numel()

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, device=self._device)

    def _seconds(self, call: Callable[[], object]) -> float:
        self._slowest(call, 2)  # the first one connects
        return min(self._slowest(call, _CALLS) for _ in range(_ROUNDS))

    def _slowest(self, call: Callable[[], object], number: int) -> float:
        device_collectives.all_reduce(self._group.everyone, self._zeros(1), _DEVICE_SUM)
        self._settle()
        start = time.perf_counter()
        for _ in range(number):
            call()
        self._settle()
        seconds = self._zeros(1) + (time.perf_counter() - start) / number
        device_collectives.all_reduce(self._group.everyone, seconds, _MAX)
        return seconds.item()

    def _settle(self) -> None:
        """Waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
