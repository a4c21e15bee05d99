"""Measures what the steps of collectives cost on the ranks of a group.

All ranks do the same at the same time, as in a collective: they share cores, memory and links. The slowest
rank counts, and of several attempts the median.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.collectives.choose import COLLECTIVES
from shardwright.collectives.prices import DEFAULT_PRICES, Line, Prices
from shardwright.collectives.routine import Routine
from shardwright.collectives.steps import Memory, Row, Span
from shardwright.comm.communicator import Communicator
from shardwright.comm.gloo_collectives import run_gloo
from shardwright.comm.reduction import Reduction

__all__ = ["measure_prices"]

_ROUNDS = 5
_SMALL, _LARGE = 16, 64 * 1024  # elements of 4 bytes
_ENOUGH_S = 0.01
_MOST_CALLS = 200
_SUM = Reduction("SUM")


def measure_prices(group: Communicator) -> Prices:
    """Prices of a group; collective over its ranks, which all get the same.

    It takes some tenths of a second, or some seconds where links are slow.
    """
    watch = _Stopwatch(group)
    topology = group.topology
    ways = _ways_between_nodes(group)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Prices(
        copy=watch.memory(lambda source, target: target.copy_(source), reads=1),
        combine=watch.memory(lambda source, target: torch.add(source, target, out=target), reads=2),
        note_s=watch.notes() if any(len(node) > 1 for node in topology.nodes) else DEFAULT_PRICES.note_s,
        message=watch.messages(ways) if ways else DEFAULT_PRICES.message,
        local_message=watch.messages(_ways_inside_of_nodes(group)) if ways else DEFAULT_PRICES.local_message,
        gloo={collective: watch.gloo(collective) for collective in COLLECTIVES},
        source=f"measured on {topology}, {when}",
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
        times = []
        for count in (_SMALL, _LARGE):
            source, target = torch.zeros(count), torch.zeros(count)
            times.append(self._seconds(lambda s=source, t=target: do(s, t)))  # type: ignore[misc]
        return _line(times, [4 * reads * count for count in (_SMALL, _LARGE)])

    def notes(self) -> float:
        """Seconds until all ranks of a node have heard one another."""
        group, number = self._group, 20
        row = Row(group.rank, group.topology.local(group.rank))
        for turn in range(number):
            row.tell("turn", turn)
            row.hear("turn", turn)
        routine, empty = Routine.of(row.steps), torch.zeros(0)
        return self._seconds(lambda: group.run_routine("probe of notes", routine, empty, empty)) / number

    def messages(self, ways: Mapping[int, int]) -> Line:
        """A line for messages that go all at once, by the bytes of the busiest node."""
        group = self._group
        if not ways:
            return DEFAULT_PRICES.local_message
        times = []
        for count in (_SMALL, _LARGE):
            row = Row(group.rank, ())
            arrivals = [
                row.receive(source, Span(Memory.OUTPUT, number * count, (number + 1) * count))
                for number, (source, target) in enumerate(ways.items())
                if target == group.rank
            ]
            if group.rank in ways:
                row.send(ways[group.rank], Span(Memory.INPUT, 0, count))
            row.wait(arrivals)
            routine = Routine.of(row.steps)
            data, output = torch.zeros(count), torch.zeros(count * len(ways))
            times.append(
                self._seconds(partial(group.run_routine, "probe of messages", routine, data, output))
            )
        most = max(sum(rank in ways for rank in node) for node in group.topology.nodes)
        return _line(times, [4 * most * count for count in (_SMALL, _LARGE)])

    def gloo(self, collective: str) -> Line:
        """A line for one of gloo's own collectives, by the bytes of the whole."""
        group = self._group
        num_ranks, times, sizes = group.topology.num_ranks, [], []
        for count in (_SMALL, _LARGE):
            part, whole = torch.zeros(count), torch.zeros(count * num_ranks)
            data, output = {
                "all_gather": (part, whole),
                "reduce_scatter": (whole, part),
            }.get(collective, (whole, whole))
            sizes.append(4 * whole.numel())
            times.append(
                self._seconds(lambda d=data, o=output: run_gloo(group.gloo, collective, d, o, _SUM, 0))  # type: ignore[misc]
            )
        return _line(times, sizes)

    def _seconds(self, call: Callable[[], object]) -> float:
        """Of a call on the slowest rank: the median of some rounds."""
        first = self._slowest(call, 2)
        number = min(_MOST_CALLS, max(1, int(_ENOUGH_S / first)))
        return statistics.median(self._slowest(call, number) for _ in range(_ROUNDS))

    def _slowest(self, call: Callable[[], object], number: int) -> float:
        self._group.gloo.barrier(dist.BarrierOptions()).wait()
        start = time.perf_counter()
        for _ in range(number):
            call()
        seconds = torch.tensor([(time.perf_counter() - start) / number], dtype=torch.float64)
        run_gloo(self._group.gloo, "all_reduce", seconds, seconds, Reduction("MAX"), 0)
        return seconds.item()


def _line(times: list[float], sizes: list[int]) -> Line:
    """Through two points: the small one has next to no bytes."""
    (small_s, large_s), (small, large) = times, sizes
    return Line(small_s, (large - small) / max(large_s - small_s, 1e-9))
