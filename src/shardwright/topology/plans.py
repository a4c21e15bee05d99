"""Turns ways into plans: closed forms choose the degrees, simulated schedules choose among them.

::

    all ways ─► closed forms ─► the best of other degrees ─► a plan of each (chain DP, simulation) ─► the best

A plan names the units of a module, so only a model at hand has one.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from shardwright.errors import PlanError
from shardwright.plan import Plan
from shardwright.planner.search.funnel import Planned, plan_survivors
from shardwright.quantities import format_seconds
from shardwright.topology.search import Answer
from shardwright.topology.way import Way

__all__ = ["best_plan", "settings_of"]

_NUM_PLANNED = 3  # each is traced anew, for its own microbatches
_LEFT_TO_PLANS = {
    "pipeline": "schedule",
    "virtual_stages": "virtual",
    "activation_checkpointing": "recompute",
}
"""Settings that a plan chooses itself, by a simulation, unless the option is pinned."""

_NEAR_TIE = 1.01


def settings_of(answer: Answer, way: Way) -> dict[str, Any]:
    """The settings of a plan that a way fixes: its degrees and microbatches, and pinned options."""
    task = answer.task
    left = {key for key, option in _LEFT_TO_PLANS.items() if option not in task.pins}
    found = {key: value for key, value in way.settings.items() if key not in left}
    low = {"bfloat16": "bf16", "float16": "fp16"}.get(task.dtype)
    return found | ({low: True} if low else {})


def best_plan(
    answer: Answer,
    make: Callable[[int, Mapping[str, Any]], Plan],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Plans the best ways that this version runs, and takes the plan with the shortest step."""
    ways = [way for way in (answer.best, *answer.alternatives) if not way.not_run_yet][:_NUM_PLANNED]
    if not ways:
        parts = " and ".join(answer.best.not_run_yet)
        raise PlanError(
            f"the best way ({answer.best.title}) needs {parts}, which this version does not run yet, and so "
            "do those that are next. Add --only-what-runs."
        )

    begun = count(1)

    def plans_of(way: Way) -> tuple[Plan]:
        progress(next(begun), len(ways))
        # Ranks that share experts share a batch.
        samples = int(way.options.microbatch * way.options.microbatches * way.options.expert_samples)
        return (make(samples, settings_of(answer, way)),)

    survivors = plan_survivors(
        ways, [way.step_s for way in ways], plans_of, seconds=lambda way, plan: _step_s(plan)
    )
    if not survivors.planned:
        raise survivors.failures[0]
    least = min(each.seconds for each in survivors.planned)
    best = next(each for each in survivors.planned if each.seconds <= least * _NEAR_TIE)
    why = (*best.plan.why, _reason(answer, best, survivors.planned))
    return best.plan.model_copy(update={"why": why})


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s + plan.prediction.update_s


def _reason(answer: Answer, chosen: Planned[Way], planned: Sequence[Planned[Way]]) -> str:
    others = [
        f"{each.candidate.title} takes {format_seconds(each.seconds)}"
        for each in planned
        if each is not chosen
    ]
    best = answer.best
    missing = ""
    if best.not_run_yet:
        missing = (
            f"The best way, {best.title}, takes {format_seconds(best.step_s)} and needs "
            f"{' and '.join(best.not_run_yet)}, which this version does not run yet. "
        )
    text = missing + (
        f"Searched: of {answer.num_ways} ways, {answer.num_fitting} of which fit, closed forms left "
        f"{len(planned)} to simulate; they say {format_seconds(chosen.expected_s)} a step of this one, its "
        "update included"
    )
    return f"{text}. {'; '.join(others)}." if others else f"{text}."
