"""The measured costs of a run's units: timed once, on all ranks together, and cached between runs."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwright.comm.encoding.codec import declare
from shardwright.comm.joining.process_group import tell_all, tell_from
from shardwright.observe.console import Phase
from shardwright.profile import UnitCost
from shardwright.torch.measuring.cost_cache import CostCache
from shardwright.torch.measuring.measure import Timing, measure_class, unit_cost
from shardwright.torch.pytorch.heap import give_back_freed_memory
from shardwright.torch.randomness.python_random import python_random_kept
from shardwright.torch.randomness.rng import get_state, set_state
from shardwright.torch.run.context import Context
from shardwright.torch.run.cores import OwnCores
from shardwright.torch.run.machine import cores_of_host
from shardwright.torch.tracing.trace_data import Trace
from shardwright.units import format_seconds

__all__ = ["Profiler", "rounds_of", "typical"]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Operations on less than this many bytes take microseconds: they are not timed.
_SMALL_BYTES = 64 * 1024

# What slows a shared machine down lasts longer than the runs of one class, often a second or two: each class
# gets more turns later, until the turns have gone on for longer than that, or eight times.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 8
_WINDOW_S = 4.0
# A cost of an earlier run holds where one of a few runs now differs from it by no more than this: a machine
# that was busy then, or is another one now, is off by more, and a disturbance seldom meets them all.
_DRIFT, _CHECKS = 0.15, 3


declare(Timing)


class Profiler:
    """Measures the cost classes of traces; collective over all ranks."""

    def __init__(self, context: Context):
        self._context = context
        self._cores = OwnCores(context)
        self._cache = CostCache(context)

    def measure(self, traces: Sequence[Trace], *, phase: Phase) -> dict[str, UnitCost]:
        """Costs of the classes that take time, by cost class; the same on every rank.

        A class that cannot be run on random data is left out, with a line in the log.
        """
        classes = _classes_worth_timing(traces)
        known = self._known(classes)
        timings = {key: known[key] for key in classes if key in known}
        missing = [key for key in classes if key not in timings]
        measured = self._measure_in_rounds({key: classes[key] for key in missing}, phase)
        timings.update((key, typical(found)) for key, found in measured.items() if found)
        give_back_freed_memory()  # the copies that were measured
        if missing and self._context.rank == 0:
            self._cache.add({key: timings[key] for key in missing if key in timings}, to=known)
        costs: dict[str, UnitCost] = {}
        for trace in traces:
            for node in trace.graph.nodes:
                if node.cost_class in timings and node.cost_class not in costs:
                    costs[node.cost_class] = unit_cost(node, trace.graph, timings[node.cost_class])
        return costs

    def _known(self, classes: Mapping[str, Trace]) -> dict[str, Timing]:
        """What earlier runs have measured, the same on every rank; nothing where it does not hold now."""
        known = self._cache.read() if self._context.rank == 0 else {}
        if self._context.mesh.world_size > 1:
            known = tell_from(0, known)
        shared = [key for key in classes if key in known]
        if not shared:
            return known
        dearest = max(shared, key=lambda key: known[key].whole_s)
        then_s = now_s = known[dearest].whole_s
        for _ in range(_CHECKS):
            found = self._measure_together(classes[dearest], dearest)
            now_s = then_s if found is None else found.whole_s
            if abs(now_s / then_s - 1) <= _DRIFT:
                return known
        log.info(
            "%s takes %s now, and %s in an earlier run: all costs are measured anew",
            dearest,
            format_seconds(now_s),
            format_seconds(then_s),
        )
        return {}

    def _measure_in_rounds(self, classes: dict[str, Trace], phase: Phase) -> dict[str, list[Timing]]:
        """The timings of every class, one of each round; none of those that cannot be run."""
        measured: dict[str, list[Timing]] = {key: [] for key in classes}
        pending = list(classes)
        done, rounds = 0, _LEAST_ROUNDS
        started = time.perf_counter()
        while pending and done < rounds:
            for number, key in enumerate(list(pending), start=1):
                phase.update(done * len(pending) + number, total=rounds * len(pending))
                timing = self._measure_together(classes[key], key)
                if timing is None:
                    pending.remove(key)
                else:
                    measured[key].append(timing)
            done += 1
            if done == 1:
                rounds = rounds_of(max(self._gathered(time.perf_counter() - started)))
        return measured

    def _measure_together(self, trace: Trace, key: str) -> Timing | None:
        """Times one class on all ranks of a host at once; None where no rank can run it."""
        context = self._context
        share_cores = (
            context.device.type == "cpu" and context.local_size * torch.get_num_threads() > cores_of_host()
        )
        mine: Timing | None = None
        failure = ""
        if context.mesh.world_size > 1:
            dist.barrier()
        generators = get_state(context.device)
        try:
            with self._cores.in_force(), python_random_kept():
                mine = measure_class(trace.samples[key], device=context.device, share_cores=share_cores)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            set_state(generators, context.device)
        found = _mean(self._gathered(mine))
        if found is None and context.rank == 0:
            name = next(node.name for node in trace.graph.nodes if node.cost_class == key)
            unit = f"{name} ({type(trace.samples[key].func).__name__})"
            log.warning("%s cannot be run on random data (%s): its cost is estimated", unit, failure)
        return found

    def _gathered(self, mine: T) -> list[T]:
        """What every rank gave."""
        return tell_all(mine) if self._context.mesh.world_size > 1 else [mine]


def _classes_worth_timing(traces: Sequence[Trace]) -> dict[str, Trace]:
    """Units, and operations on much data, with a trace that has a sample of each."""
    found: dict[str, Trace] = {}
    for trace in traces:
        for node in trace.graph.nodes:
            num_bytes = sum(trace.graph.values[v].spec.num_bytes for v in (*node.inputs, *node.outputs))
            if node.kind == "unit" or (node.outputs and num_bytes >= _SMALL_BYTES):
                found.setdefault(node.cost_class, trace)
    return found


def rounds_of(first_s: float) -> int:
    """How many rounds there are, where the first took `first_s` seconds."""
    return max(_LEAST_ROUNDS, min(_MOST_ROUNDS, math.ceil(_WINDOW_S / first_s)))


def typical(timings: Sequence[Timing]) -> Timing:
    """The medians of all rounds: a run is disturbed as often as they were, and as little."""
    return _combined(timings, statistics.median)


def _mean(timings: Sequence[Timing | None]) -> Timing | None:
    there = [timing for timing in timings if timing is not None]
    return _combined(there, statistics.fmean) if there else None


def _combined(timings: Sequence[Timing], average: Callable[[Iterable[float]], float]) -> Timing:
    inputs = [t.input_s for t in timings if t.input_s is not None]
    return Timing(
        forward_s=average([t.forward_s for t in timings]),
        backward_s=average([t.backward_s for t in timings]),
        input_s=average(inputs) if len(inputs) == len(timings) else None,
        weight_s=average([t.weight_s for t in timings]),
        spread=average([t.spread for t in timings]),
    )
