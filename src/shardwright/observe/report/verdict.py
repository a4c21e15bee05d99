"""The answer on top of a report: how fast the run was, and what to do next.

::

    does a new run get another plan? ── yes ─► begin one
            │ no
    slower than predicted? ── yes ─► the part of the step that is furthest above its prediction says why
            │ no
            ▼
    the plan limits it ────────────► the change that saves most, if it saves 2 % or more
            │ nothing saves so much
            ▼
    the largest part of the step that is no work says why

::

    457 ms a step, 2.2k tok/s, 1.73 times one process, 10 % idle, 4.8 % slower than predicted.
    Next: ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.observe.console import format_rate
from shardwright.observe.report.parts import StepPart, worst_of
from shardwright.observe.summary import ALONE, RunTotals
from shardwright.plan import Plan
from shardwright.planner.profiles import NOT_CUT_FURTHER
from shardwright.planner.replay import sensitivities
from shardwright.planner.waterfall import Waterfall
from shardwright.quantities import format_seconds

_PARTED = 0.1
"""So much slower than predicted or more, and the reason for that comes first."""

_ONE_STAGE = 1.25
"""A stage that takes so many times what the others take, relative to its prediction, stands out."""

_WORTH = 0.02
_LARGE = 0.1
_REMEDIES = {
    "bubble": "a larger batch in more microbatches",
    "imbalance": "fewer stages, or leave the cuts to the planner; nothing, if one unit is that large",
    "recomputation": "a higher memory_limit if there is room, or shards (sharded_data_parallel_degree)",
    "communication": "stages on one host (placement_strategy), fewer stages, or larger microbatches",
    "overhead": "fewer ranks: the units are small",
}


def next_step(
    plan: Plan | None,
    parts: Sequence[StepPart],
    waterfall: Waterfall | None,
    stages: Sequence[tuple[int, float]],
    *,
    slower: float | None,
    outside_s: float = 0.0,
) -> str:
    if plan is None or plan.prediction is None or waterfall is None:
        return "set plan_one_stage to have runs of one stage predicted, too, and see what limits them"
    if slower is not None and slower > _PARTED:
        measured_s = (1 + slower) * plan.prediction.step_s
        if outside_s > _LARGE * measured_s:
            return (
                f"look at the step function: {format_seconds(outside_s)} of a step, "
                f"{outside_s / measured_s * 100:.0f}%, go to code outside of the model's units, which every "
                "rank runs and this plan does not count; a teacher can be a part of the wrapped model"
            )
        return _why_slower(plan, parts, stages)
    return _what_limits(plan, waterfall)


def _remedy(kind: str, plan: Plan) -> str:
    """What helps against the largest part of a step, without what runners-up have shown to be slower."""
    tried = {plan.schedule.kind, *(other.schedule for other in plan.alternatives)}
    fewer = any(other.microbatches < plan.schedule.microbatches for other in plan.alternatives)
    if kind == "bubble" and "zb_v" not in tried:
        return f"{_REMEDIES[kind]}, or pipeline: zb_v"
    if kind == "overhead" and plan.schedule.microbatches > 1 and not fewer:
        return f"fewer microbatches or {_REMEDIES[kind]}"
    return _REMEDIES[kind]


def _why_slower(plan: Plan, parts: Sequence[StepPart], stages: Sequence[tuple[int, float]]) -> str:
    assert plan.prediction is not None
    if plan.prediction.provenance == "estimated":
        return (
            "set profile to measured: the prediction rests on estimates, and times of this machine do better"
        )
    worst = worst_of(parts)
    if worst is None:
        return "record a step (any run of this version does): nothing tells which part of it is slow"
    part = parts[worst]
    assert part.difference is not None
    more = f"{format_seconds(part.difference)} more than predicted"
    if part.kind in ("forward", "backward", "imbalance"):
        return _slow_work(stages, more)
    if part.kind == "waiting":
        return (
            f"look in the timeline for the first action that begins late: ranks wait {more}; "
            "shardwright probe measures the links"
        )
    return (
        f"look at what goes on around the schedule, which takes {more}: sums over ranks, data, and values "
        "that the script reads"
    )


def _slow_work(stages: Sequence[tuple[int, float]], more: str) -> str:
    """All stages are slow alike, or one of them is."""
    ratios = sorted(ratio for _, ratio in stages)
    if len(ratios) > 1:
        stage, ratio = max(stages, key=lambda each: each[1])
        middle = ratios[(len(ratios) - 1) // 2]
        if ratio > _ONE_STAGE * middle:
            return (
                f"look at stage {stage}: it takes {ratio:.1f} times its prediction, the others {middle:.1f}; "
                "its host or device is slow, or shared with something"
            )
    times = f", {ratios[len(ratios) // 2]:.1f} times what they were timed at" if ratios else ""
    return (
        f"see what else runs on the machine (top): units take {more}{times}; if nothing does, "
        "SHARDWRIGHT_CACHE=off times them again"
    )


def _what_limits(plan: Plan, waterfall: Waterfall) -> str:
    step_s = waterfall.step_s
    may_not_be_cut = any(NOT_CUT_FURTHER in reason for reason in plan.why)
    best = max(
        (
            each
            for each in sensitivities(plan)
            if "microbatch" in each.name
            and not (may_not_be_cut and int(each.name.split()[0]) > plan.schedule.microbatches)
        ),
        key=lambda each: each.saved_s,
        default=None,
    )
    if best is not None and step_s and best.saved_s > _WORTH * step_s:
        return (
            f"try {best.name}: the same batch in so many parts saves {best.saved_s / step_s * 100:.0f}% by "
            "prediction, if a microbatch takes time in proportion to its size"
        )
    kinds = {kind: waterfall.seconds(kind) for kind in _REMEDIES}  # type: ignore[arg-type]
    largest = max(kinds, key=lambda kind: kinds[kind])
    share = kinds[largest] / step_s if step_s else 0.0
    if share > _LARGE:
        return f"{largest} takes {share * 100:.0f}% of the step: {_remedy(largest, plan)}"
    compute = waterfall.seconds("compute") / step_s if step_s else 0.0
    return (
        f"forward and backward are {compute * 100:.0f}% of the step, so only faster units or other machines "
        "help: torch.profiler shows our actions by name, shardwright search tries machines"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run came to; None where it is not known.

    Attributes:
        step_s: median seconds of a step; of a plan that has not run, as predicted.
        measured: whether the run has done a step.
        rate: tokens or samples a second, all ranks together.
        speed_up: times one process, which would do the work of the ranks one after the other.
        idle: idle share of the ranks' time, 0 to 1.
        slower: measured / predicted - 1; negative where the run was faster.
    """

    step_s: float
    measured: bool
    rate: float | None
    rate_unit: str
    speed_up: float | None
    idle: float | None
    slower: float | None
    next: str

    @property
    def figures(self) -> tuple[str, ...]:
        found = [f"{format_seconds(self.step_s)} a step{'' if self.measured else ', as predicted'}"]
        if self.rate is not None:
            found.append(f"{format_rate(self.rate)} {self.rate_unit}")
        is_doubtful = self.slower is not None and self.slower > 1  # as at the end of a run
        if self.speed_up is not None and self.speed_up > ALONE and not is_doubtful:
            found.append(f"{self.speed_up:.2f} times one process")
        if self.idle is not None:
            found.append(f"{self.idle:.0%} idle")
        if self.slower is not None and self.slower > 1:
            found.append(f"{self.slower + 1:.1f} times the predicted time")
        elif self.slower is not None:
            how = "slower" if self.slower >= 0 else "faster"
            percent = abs(self.slower) * 100
            found.append(f"{percent:.{int(percent < 10)}f}% {how} than predicted")
        return tuple(found)

    def __str__(self) -> str:
        return f"{', '.join(self.figures)}. Next: {self.next}"


def judge(
    plan: Plan | None,
    totals: RunTotals,
    parts: Sequence[StepPart],
    waterfall: Waterfall | None,
    stages: Sequence[tuple[int, float]],
) -> Verdict | None:
    """The verdict on a run or plan; None where neither was anything measured nor predicted."""
    prediction = None if plan is None else plan.prediction
    predicted_s = 0.0 if prediction is None else prediction.step_s
    measured = totals.step_s > 0
    if not measured and not predicted_s:
        return None
    slower = totals.step_s / predicted_s - 1.0 if measured and predicted_s else None
    rate, unit = totals.rate
    idle = totals.median("bubble_measured")
    return Verdict(
        step_s=totals.step_s or predicted_s,
        measured=measured,
        rate=rate or None,
        rate_unit=unit,
        speed_up=totals.speed_up(plan),
        idle=prediction.bubble if idle is None and prediction is not None and not measured else idle,
        slower=slower,
        next=next_step(plan, parts, waterfall, stages, slower=slower, outside_s=totals.outside_s),
    )
