"""Turns ways into plans: closed forms choose the degrees, simulated schedules choose among them.

::

    all ways ─► closed forms ─► the best of other degrees ─► a plan of each (chain DP, simulation) ─► the best

A plan names the units of a module, so only a model at hand has one.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.errors import PlanError
from shardwright.plan import Plan
from shardwright.topology.search import Answer
from shardwright.topology.way import Way
from shardwright.units import format_seconds

__all__ = ["best_plan", "settings_of"]

_NUM_PLANNED = 3
_LEFT_TO_PLANS = {
    "pipeline": "schedule",
    "virtual_stages": "virtual",
    "activation_checkpointing": "recompute",
}
"""Settings that a plan chooses itself, by a simulation, unless the option is pinned."""

_NEAR_TIE = 1.01


def settings_of(answer: Answer, way: Way) -> dict[str, Any]:
    """The settings of a plan that a way fixes: its degrees and microbatches, and pinned options.

    Args:
        answer: that the way is a part of.
        way: one that this version runs.
    """
    task = answer.task
    left = {key for key, option in _LEFT_TO_PLANS.items() if option not in task.pins}
    found = {key: value for key, value in way.settings.items() if key not in left}
    low = {"bfloat16": "bf16", "float16": "fp16"}.get(task.dtype)
    return found | ({low: True} if low else {})


def best_plan(answer: Answer, make: Callable[[int, Mapping[str, Any]], Plan]) -> Plan:
    """Plans the best ways that this version runs, and takes the plan with the shortest step.

    Args:
        answer: of a search.
        make: makes the plan of so many samples of a replica, with these settings.

    Raises:
        PlanError: no way runs, or none can be planned; the message of the first.
    """
    ways = [way for way in (answer.best, *answer.alternatives) if not way.not_run_yet][:_NUM_PLANNED]
    if not ways:
        parts = " and ".join(answer.best.not_run_yet)
        raise PlanError(
            f"the best way ({answer.best.title}) needs {parts}, which this version does not run yet, and so "
            "do those that are next. Add --only-what-runs."
        )
    found: list[tuple[Way, Plan]] = []
    failures: list[PlanError] = []
    for way in ways:
        try:
            samples = int(way.options.microbatch * way.options.microbatches)
            found.append((way, make(samples, settings_of(answer, way))))
        except PlanError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    least = min(_step_s(plan) for _, plan in found)
    way, plan = next((way, plan) for way, plan in found if _step_s(plan) <= least * _NEAR_TIE)
    return plan.model_copy(update={"why": (*plan.why, _reason(answer, way, found))})


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s + plan.prediction.update_s


def _reason(answer: Answer, chosen: Way, found: list[tuple[Way, Plan]]) -> str:
    others = [
        f"{way.title} takes {format_seconds(_step_s(plan))}" for way, plan in found if way is not chosen
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
        f"{len(found)} to simulate; they say {format_seconds(chosen.step_s)} a step of this one, its update "
        "included"
    )
    return f"{text}. {'; '.join(others)}." if others else f"{text}."
