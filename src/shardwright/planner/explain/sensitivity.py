"""Finds what would shorten a planned step, from the plan alone."""

from dataclasses import dataclass

from shardwright.plan import Plan
from shardwright.planner.explain.plan_replay import Change, base_setting, change_setting, play
from shardwright.quantities import counted

__all__ = ["Sensitivity", "sensitivities"]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One change and its gain.

    Attributes:
        step_s: seconds of the step with it.
        saved_s: seconds less than without it; negative where it costs time.
        assumption: what is taken for granted; empty where nothing is.
    """

    name: str
    step_s: float
    saved_s: float
    assumption: str = ""


_PROPORTION = "seconds and bytes of a microbatch in proportion to its size"


def sensitivities(plan: Plan) -> tuple[Sensitivity, ...]:
    """Faster compute, faster links, other microbatches: the step with each, everything else as planned.

    Links are left out where the plan does not say which it was made for. So are microbatches whose number no
    pin has set, and numbers of runners-up: the planner has weighed them by their own costs, which proportion
    would contradict.
    """
    base_s = play(base_setting(plan)).step_s
    assert plan.prediction is not None
    microbatches = plan.schedule.microbatches
    changes = [("10% faster compute", Change(compute_rate=1.1), "")]
    if plan.prediction.conditions is not None:
        changes.append(("twice the bandwidth", Change(bandwidth=2.0), ""))
        changes.append(("half the latency", Change(latency=0.5), ""))
    if "microbatches" in plan.pins:
        changes += [
            (counted(number, "microbatch", "es"), Change(num_microbatches=number), _PROPORTION)
            for number in (2 * microbatches, microbatches // 2)
            if number and all(number != other.microbatches for other in plan.alternatives)
        ]
    found = []
    for name, change, assumption in changes:
        step_s = play(change_setting(plan, change)).step_s
        found.append(Sensitivity(name, step_s, base_s - step_s, assumption))
    return tuple(found)
