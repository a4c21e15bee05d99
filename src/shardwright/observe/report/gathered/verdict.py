"""The answer on top of a report: how fast the run was, and what to do next.

::

    457 ms a step, 2.2k tok/s, 1.73 times one process, 10 % idle, 4.8 % slower than predicted.
    Next: ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardwright.observe.progress import format_rate
from shardwright.observe.report.gathered.advice import next_step
from shardwright.observe.report.gathered.measured import StepMetrics
from shardwright.observe.report.gathered.parts import StepPart
from shardwright.observe.run_end import own_replicas, work_of_one_process
from shardwright.plan import Plan
from shardwright.planner.explain.waterfall import Waterfall
from shardwright.quantities import format_seconds

__all__ = ["Verdict", "judge", "typical_step_s"]

_ALONE = 1.05
"""Less than this is the speed of one process."""


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
        next: one sentence: what to do.
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
        """The parts of the first sentence."""
        found = [f"{format_seconds(self.step_s)} a step{'' if self.measured else ', as predicted'}"]
        if self.rate is not None:
            found.append(f"{format_rate(self.rate)} {self.rate_unit}")
        is_doubtful = self.slower is not None and self.slower > 1  # as at the end of a run
        if self.speed_up is not None and self.speed_up > _ALONE and not is_doubtful:
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
        """Both sentences."""
        return f"{', '.join(self.figures)}. Next: {self.next}"


def typical_step_s(steps: Sequence[StepMetrics]) -> float | None:
    """Median seconds of a step, without the first one, which traces and plans; None where none is known."""
    times = [step.step_s for step in (steps[1:] or steps) if step.step_s is not None]
    return median(times) if times else None


def judge(
    plan: Plan | None,
    steps: Sequence[StepMetrics],
    parts: Sequence[StepPart],
    waterfall: Waterfall | None,
    stages: Sequence[tuple[int, float]],
    *,
    step_s: float | None,
) -> Verdict | None:
    """The verdict on a run or plan; None where neither was anything measured nor predicted."""
    prediction = None if plan is None else plan.prediction
    predicted_s = None if prediction is None else prediction.step_s
    found_s = step_s if step_s is not None else predicted_s
    if found_s is None:
        return None
    steady = steps[1:] or steps
    tokens = [step.tokens_per_s for step in steady if step.tokens_per_s is not None]
    samples = [step.samples_per_s for step in steady if step.samples_per_s is not None]
    rates = tokens or samples
    idle = [step.bubble for step in steady if step.bubble is not None]
    predicted_idle = None if prediction is None or step_s is not None else prediction.bubble
    slower = None if step_s is None or not predicted_s else step_s / predicted_s - 1.0
    outside_s = median(step.outside_s or 0.0 for step in steady) if steady else 0.0
    return Verdict(
        step_s=found_s,
        measured=step_s is not None,
        rate=median(rates) if rates else None,
        rate_unit="tok/s" if tokens else "samples/s",
        speed_up=_speed_up(plan, steady, step_s),
        idle=median(idle) if idle else predicted_idle,
        slower=slower,
        next=next_step(
            plan,
            parts,
            waterfall,
            stages,
            slower=slower,
            outside_s=outside_s,
        ),
    )


def _speed_up(plan: Plan | None, steps: Sequence[StepMetrics], step_s: float | None) -> float | None:
    """Seconds of work of all ranks over those of the step."""
    work = [
        work_of_one_process(step.work_s, step.outside_s or 0.0, plan)
        for step in steps
        if step.work_s is not None
    ]
    replicas = own_replicas(plan)  # the metrics have the work of one pipeline
    return median(work) * replicas / step_s if work and step_s and replicas is not None else None
