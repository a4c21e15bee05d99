"""The measured costs of a run's units: timed on all ranks together, in a budget, and cached between runs."""

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwright.comm.codec import declare
from shardwright.comm.joining.process_group import tell_from
from shardwright.model_graph import ModelGraph
from shardwright.observe.console import Phase
from shardwright.profile import Profile, UnitCost
from shardwright.quantities import cores_of_host, format_seconds
from shardwright.run.context import Context
from shardwright.run.machine import cost_cache
from shardwright.run.memory import OwnCores, give_back_freed_memory
from shardwright.run.timing import Share, Timing, Turns, unit_cost

log = logging.getLogger(__name__)

# Operations on less than this many bytes take microseconds: they are not timed.
_SMALL_BYTES = 64 * 1024

# A cost of an earlier run holds where one of a few runs now differs from it by no more than this: a machine
# that was busy then, or is another one now, is off by more, and a disturbance seldom meets them all.
_DRIFT, _CHECKS = 0.15, 3
# Of costs that are inferred from one other batch size, or between two: they may be off by half as much.
_SPREAD_OF_INFERRED, _SPREAD_BETWEEN = 0.5, 0.1


declare(Timing)


class Traced(Protocol):
    """A trace, of any framework."""

    @property
    def graph(self) -> ModelGraph:
        """What it computes."""


@dataclass(frozen=True, slots=True)
class ToProfile:
    """One size of microbatches."""

    microbatches: int
    trace: Traced
    estimated: Profile


class Profiler:
    """Measures the cost classes of traces; collective over all ranks."""

    def __init__(
        self,
        context: Context,
        *,
        time_class: Callable[[Any, str, bool], Timing],
        framework: str = "",
        units_alone: bool = False,
    ):
        self._context = context
        self._cores = OwnCores(context)
        self._cache = cost_cache(context, framework=framework)
        self._units_alone = units_alone
        self._time_class = time_class

    def measure(
        self, sizes: Sequence[ToProfile], *, budget_s: float, phase: Phase, again: bool = False
    ) -> dict[str, UnitCost]:
        """Costs of the classes that take time, by cost class; the same on every rank.

        A class that the budget leaves no time for is inferred from the others. One that cannot be run on
        random data is left out, with a line in the log.
        """
        classes = _classes_worth_timing([size.trace for size in sizes], units_alone=self._units_alone)
        known, outdated = self._known(classes, again=again)
        remembered = {key: known[key] for key in classes if key in known}
        if again and remembered.keys() == classes.keys():
            budget_s = 0.0
        turns = Turns(_shares(sizes, classes), budget_s, remembered)
        self._take_turns(turns, classes, phase)
        give_back_freed_memory()  # the copies that were measured
        fresh = {key: typical(found) for key, found in turns.timed.items()}
        timings = {**outdated, **remembered, **fresh}
        skipped = [key for key in classes if key not in timings and key not in turns.failed]
        costs: dict[str, UnitCost] = {}
        for size in sizes:
            for node in size.trace.graph.nodes:
                if node.cost_class in timings and node.cost_class not in costs:
                    costs[node.cost_class] = unit_cost(node, size.trace.graph, timings[node.cost_class])
        inferred = _inferred(skipped, sizes, costs, turns.shares)
        if (fresh or inferred) and self._context.rank == 0:
            as_known = {key: _as_timing(cost) for key, cost in inferred.items()}
            self._cache.write({**known, **as_known, **fresh})
        return {**costs, **inferred}

    def _known(
        self, classes: Mapping[str, Traced], *, again: bool = False
    ) -> tuple[dict[str, Timing], dict[str, Timing]]:
        """The costs that earlier runs have measured, the same on every rank: those that hold, and others.

        One class is timed again. Where it takes another time now, no cost holds: the machine was busy then,
        or is now. The others are then what they were, times what that class takes more.
        """
        known = self._cache.read() if self._context.rank == 0 else {}
        if self._context.mesh.world_size > 1:
            known = tell_from(0, known)
        shared = [key for key in classes if key in known and not known[key].inferred]
        if not shared:
            return known, {}
        dearest = max(shared, key=lambda key: known[key].whole_s)
        then_s = now_s = known[dearest].whole_s
        for _ in range(_CHECKS):
            found = self._measure_together(classes[dearest], dearest)
            now_s = then_s if found is None else found.whole_s
            if abs(now_s / then_s - 1) <= _DRIFT:
                return known, {}
        if again:
            return {key: timing.slower(now_s / then_s) for key, timing in known.items()}, {}
        log.info(
            "%s takes %s now, and %s in an earlier run: costs are measured anew",
            dearest,
            format_seconds(now_s),
            format_seconds(then_s),
        )
        return {}, {key: known[key].slower(now_s / then_s) for key in shared}

    def _take_turns(self, turns: Turns, classes: Mapping[str, Traced], phase: Phase) -> None:
        """Times one class after the other, on all ranks in the same order, for as long as it is worth it."""
        begin_s = time.perf_counter()
        of_all = self._context.from_all_ranks
        while (key := turns.next(max(of_all(time.perf_counter() - begin_s)))) is not None:
            known = sum(not timing.inferred for timing in turns.remembered.values())
            phase.update(len(turns.timed), total=len(classes) - known)
            turns.add(key, self._measure_together(classes[key], key))

    def _measure_together(self, trace: Traced, key: str) -> Timing | None:
        """Times one class on all ranks of a host at once; None where no rank can run it."""
        context = self._context
        share_cores = shares_cores(context)
        mine: Timing | None = None
        failure = ""
        if context.mesh.world_size > 1:
            dist.barrier()
        try:
            with self._cores.in_force():
                mine = self._time_class(trace, key, share_cores)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        found = _mean(self._context.from_all_ranks(mine))
        if found is None and context.rank == 0:
            node = next(node for node in trace.graph.nodes if node.cost_class == key)
            kind = trace.graph.units[node.name].class_name if node.kind == "unit" else node.name
            unit = f"{node.name} ({kind})"
            log.warning("%s cannot be run on random data (%s): its cost is estimated", unit, failure)
        return found


def shares_cores(context: Context) -> bool:
    """Whether ranks compute on the cores of a host, and take turns there."""
    return context.device.type == "cpu" and context.local_size * torch.get_num_threads() > cores_of_host()


def _classes_worth_timing(traces: Sequence[Traced], *, units_alone: bool) -> dict[str, Traced]:
    """Units, and operations on much data, with a trace that has a sample of each."""
    found: dict[str, Traced] = {}
    for trace in traces:
        for node in trace.graph.nodes:
            num_bytes = sum(trace.graph.values[v].spec.num_bytes for v in (*node.inputs, *node.outputs))
            is_large = node.outputs and num_bytes >= _SMALL_BYTES and not units_alone
            if node.kind == "unit" or is_large:
                found.setdefault(node.cost_class, trace)
    return found


def _shares(sizes: Sequence[ToProfile], classes: Mapping[str, Traced]) -> dict[str, Share]:
    """What each class has of a step, as estimated. Units of one name are of one kind at all sizes."""
    kinds: dict[str, tuple[str, int]] = {}
    seconds: dict[str, float] = dict.fromkeys(classes, 0.0)
    calls: Counter[str] = Counter()
    for size in sizes:
        costs = size.estimated.costs
        for node in size.trace.graph.nodes:
            key = node.cost_class
            if key in classes:
                kinds.setdefault(key, (node.label, size.microbatches))
                cost = costs.get(key)
                calls[key] += size.microbatches
                seconds[key] += size.microbatches * (cost.forward_s + cost.backward_s if cost else 0.0)
    return {key: Share(kinds[key][0], seconds[key], kinds[key][1], calls[key]) for key in classes}


def _inferred(
    skipped: Sequence[str],
    sizes: Sequence[ToProfile],
    costs: Mapping[str, UnitCost],
    shares: Mapping[str, Share],
) -> dict[str, UnitCost]:
    """Costs of classes that were not timed.

    Between two sizes of its kind that were timed, seconds lie on the line through them, over the estimates.
    From one, or from all others where its kind was not timed at all, they are the estimate times the ratio.
    """
    estimated = {key: cost for size in sizes for key, cost in size.estimated.costs.items()}
    points: dict[str, list[tuple[float, float]]] = {}
    for key, cost in costs.items():
        if (guess_s := _whole_s(estimated[key])) > 0:
            points.setdefault(shares[key].kind, []).append((guess_s, _whole_s(cost)))
    all_points = [point for of_kind in points.values() for point in of_kind] or [(1.0, 1.0)]
    found = {}
    for key in skipped:
        if key in estimated:
            own = points.get(shares[key].kind, [])
            factor = _ratio_at(_whole_s(estimated[key]), own or all_points, is_kind=bool(own))
            between = len({guess_s for guess_s, _ in own}) > 1
            found[key] = replace(
                estimated[key].scaled(seconds=factor, num_bytes=1.0),
                provenance="measured",
                spread=_SPREAD_BETWEEN if between else _SPREAD_OF_INFERRED,
            )
    return found


def _as_timing(cost: UnitCost) -> Timing:
    """What the next run remembers of a cost that was inferred."""
    return Timing(
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        input_s=cost.input_s,
        weight_s=cost.weight_s,
        spread=cost.spread,
        inferred=True,
    )


def _whole_s(cost: UnitCost) -> float:
    return cost.forward_s + cost.backward_s


def _ratio_at(guess_s: float, points: Sequence[tuple[float, float]], *, is_kind: bool) -> float:
    """What an estimate is to be multiplied by, from estimates and measured seconds of others."""
    (low_guess_s, low_s), (high_guess_s, high_s) = min(points), max(points)
    if not is_kind or low_guess_s == high_guess_s or guess_s <= 0:
        return statistics.median(measured_s / other_s for other_s, measured_s in points)
    slope = max(0.0, (high_s - low_s) / (high_guess_s - low_guess_s))
    return max(low_s + slope * (guess_s - low_guess_s), min(low_s, high_s) / 10) / guess_s


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
