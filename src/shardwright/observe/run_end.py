"""What a run says at its end: what it came to, beside what was predicted, and how to go on.

::

    done: 200 steps, loss 3.2145 | 41.2k tok/s | 1.73 times one process | step 0.91 s, 110% slower than ...
      the step took 2.1 times its prediction: units took 3.1 times what they took alone (the machine was busy)
      report runs/train/report.html; saved step 200; for more: shardwright run --resume train.py
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shardwright.observe.metrics import StepRecord
from shardwright.observe.plan_text import seconds_of_one_process
from shardwright.observe.progress import format_loss, format_rate
from shardwright.plan import Plan
from shardwright.quantities import beside_prediction, format_seconds

__all__ = ["RunTotals", "format_end", "own_replicas", "work_of_one_process"]

_LATEST = 1000
"""Steps whose medians are told: those of a long run that began slowly."""

_ALONE = 1.05
"""Less than this is the speed of one process."""

_LARGE = 0.1
"""A larger share of a step outside of the model's units is told."""

_PARTED = 1.15
"""So many times its prediction or more, or as much less: a reason is told."""


@dataclass(slots=True)
class RunTotals:
    """What the steps of a run came to.

    Attributes:
        last_step: number of the last one.
    """

    steps: int = 0
    last_step: int = 0
    loss: float | None = None
    _latest: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def add(self, record: StepRecord) -> None:
        """Counts a step. The first one traces and plans, so it tells nothing of the others."""
        self.steps += 1
        self.last_step = record.step
        self.loss = record.loss if record.loss is not None else self.loss
        if self.steps == 2:
            self._latest.clear()
        self._latest.append(record)

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(record.seconds for record in self._latest) if self._latest else 0.0

    @property
    def rate(self) -> tuple[float, str]:
        """Median rate, and its unit: tokens a second, or samples where tokens are not known."""
        timed = [record for record in self._latest if record.seconds > 0]
        tokens = [record.tokens / record.seconds for record in timed if record.tokens is not None]
        if tokens:
            return median(tokens), "tok/s"
        return median([record.samples / record.seconds for record in timed] or [0.0]), "samples/s"

    @property
    def work_s(self) -> float | None:
        """Median seconds for which the ranks of a replica work in a step, all of them together."""
        found = [record.work_s for record in self._latest if record.work_s is not None]
        return median(found) if found else None

    @property
    def outside_s(self) -> float:
        """Median seconds of a step in operations that rest on no unit: every rank of a pipeline runs them."""
        return median(record.outside_s or 0.0 for record in self._latest) if self._latest else 0.0


def format_end(
    totals: RunTotals,
    plan: Plan | None,
    *,
    replicas: int | None,
    ended: str = "done",
    further: Sequence[str] = (),
) -> str:
    """The lines at the end of a run."""
    steps = f"{totals.steps} step{'s' * (totals.steps != 1)}"
    if totals.last_step != totals.steps:
        steps += f" to step {totals.last_step}"
    loss = "" if totals.loss is None else f", loss {format_loss(totals.loss)}"
    rate, unit = totals.rate
    parts = [f"{ended}: {steps}{loss}", *([f"{format_rate(rate)} {unit}"] if rate else [])]
    predicted_s = plan.prediction.step_s if plan is not None and plan.prediction is not None else 0.0
    measured_s = totals.step_s
    speed_up = _speed_up(totals, plan, replicas)
    # What makes a step take twice its time makes the work in it longer, too, with which it is compared.
    if speed_up is not None and not 0 < 2 * predicted_s < measured_s:
        parts.append(f"{speed_up:.2f} times one process")
    step = f"step {format_seconds(measured_s)}"
    if totals.steps == 1:
        step += ", which traced and planned"
    if predicted_s > 0 and measured_s > 0 and totals.steps > 1:
        step += f", {beside_prediction(measured_s, predicted_s)}"
    lines = [" | ".join([*parts, step])]
    if predicted_s > 0 and measured_s > 0 and plan is not None and totals.steps > 1:
        lines += _why_they_part(totals, plan, measured_s / predicted_s)
    if further:
        lines.append("  " + "; ".join(further))
    return "\n".join(lines)


def own_replicas(plan: Plan | None) -> int | None:
    """The replicas of the model whose ranks' seconds of work one process would take.

    None where ranks share layers or parameters: their work includes waiting for each other. So it may where
    nothing was planned.
    """
    if plan is None or plan.mesh.share > 1 or plan.mesh.shard > 1:
        return None
    return plan.mesh.data


def work_of_one_process(work_s: float, outside_s: float, plan: Plan | None) -> float:
    """Seconds of the work of a replica's ranks in one process, which runs once what each of them runs."""
    return work_s - outside_s * (0 if plan is None else plan.mesh.pipeline - 1)


def _speed_up(totals: RunTotals, plan: Plan | None, replicas: int | None) -> float | None:
    """Seconds of work in a step over its seconds: one process would do it one after the other."""
    work_s, step_s = totals.work_s, totals.step_s
    if work_s is None or not step_s or replicas is None:
        return None
    found = work_of_one_process(work_s, totals.outside_s, plan) * replicas / step_s
    return found if found > _ALONE else None


def _why_they_part(totals: RunTotals, plan: Plan, ratio: float) -> list[str]:
    """Why measured and predicted seconds part, where they do."""
    if 1 / _PARTED < ratio < _PARTED:
        return []
    begin = f"  the step took {ratio:.1f} times its prediction"
    assert plan.prediction is not None
    outside_s = totals.outside_s
    if ratio > 1 and outside_s > _LARGE * totals.step_s:
        return [
            f"{begin}: {format_seconds(outside_s)} of it are code outside of the model's units, which every "
            "rank runs and this plan does not count (a teacher? make it a part of the wrapped model)"
        ]
    if plan.prediction.provenance == "estimated":
        return [f"{begin}, which rests on estimates: profile: measured times the units"]
    alone_s = seconds_of_one_process(plan)
    work_s = totals.work_s
    if work_s is None or not alone_s:
        return [begin]
    slower = work_s / alone_s
    if slower > _PARTED:
        return [f"{begin}: units took {slower:.1f} times what they took alone (the machine was busy)"]
    if slower < 1 / _PARTED:
        return [f"{begin}: units took {slower:.1f} times what they took alone (it was busy then)"]
    if ratio > 1:
        return [f"{begin}: units took what they took alone, so ranks waited longer than planned"]
    return [f"{begin}: units took what they took alone, so ranks waited less than planned"]
