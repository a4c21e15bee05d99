"""What a run came to: its last words beside the prediction, and its summary later on.

::

    done: 200 steps, loss 3.2145 | 41.2k tok/s | 1.73 times one process | step 0.91 s, 110% slower than ...
      the step took 2.1 times its prediction: units took 3.1 times what they took alone (the machine was busy)
      report runs/train/report.html; saved step 200; for more: shardwright run --resume train.py
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from shardwright.errors import UsageError
from shardwright.observe.console import format_loss, format_rate
from shardwright.observe.goodput import Spent
from shardwright.observe.metrics import StepRecord, read_first_and_last, record_of
from shardwright.observe.plan_text import seconds_of_one_process
from shardwright.observe.run_folder import RunFolder, show_path
from shardwright.plan import Plan
from shardwright.quantities import beside_prediction, format_seconds
from shardwright.text import align

_LATEST = 1000
"""Steps whose medians are told: those of a long run that began slowly."""

_MOST_SLOW, _TOLD = 3, 0.01

ALONE = 1.05
"""Less than this is the speed of one process."""

_LARGE = 0.1
"""A larger share of a step outside of the model's units is told."""

_PARTED = 1.15
"""So many times its prediction or more, or as much less: a reason is told."""


@dataclass(slots=True)
class RunTotals:
    """What the steps of a run came to, as they end, or as its metrics tell of them later."""

    steps: int = 0
    last_step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    _latest: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_LATEST))
    _seconds: float = 0.0
    _slow: dict[int, list[float]] = field(default_factory=dict)

    def add(self, record: StepRecord) -> None:
        """Counts a step. The first one traces and plans, so it tells nothing of the others."""
        self.steps += 1
        self.last_step = record.step
        self.first_loss = record.loss if self.steps == 1 else self.first_loss
        self.loss = record.loss if record.loss is not None else self.loss
        if self.steps == 2:
            self._latest.clear()
        self._latest.append(record)
        self._seconds += record.seconds
        if record.slow_rank is not None:
            self._slow.setdefault(record.slow_rank, []).append(record.slow_s or 0.0)

    def median(self, figure: str) -> float | None:
        """Of an attribute of the steps; None where none of them knows it."""
        found = [value for record in self._latest if (value := getattr(record, figure)) is not None]
        return median(found) if found else None

    def _costs(self) -> list[tuple[float, int]]:
        """Seconds for which a rank kept the others waiting, and the rank: most first."""
        return sorted(((sum(each), rank) for rank, each in self._slow.items()), reverse=True)

    def slow_ranks(self) -> list[str]:
        """The ranks that the others waited for, the one that cost most first, each in a line."""
        return [
            f"rank {rank} kept the others waiting in {len(self._slow[rank])} of {self.steps} steps: "
            f"{format_seconds(lost_s)}, {min(1.0, lost_s / self._seconds):.0%} of their time"
            for lost_s, rank in self._costs()[:_MOST_SLOW]
            if lost_s > _TOLD * self._seconds
        ]

    @property
    def slowest(self) -> str:
        """The rank that cost most, in few words; empty where none cost much."""
        lost_s, rank = next(iter(self._costs()), (0.0, 0))
        if lost_s <= _TOLD * self._seconds or not self._seconds:
            return ""
        return f"rank {rank}: {min(1.0, lost_s / self._seconds):.0%}"

    @property
    def step_s(self) -> float:
        """Median seconds of a step; 0 where they are not known."""
        times = [record.seconds for record in self._latest if record.seconds > 0]
        return median(times) if times else 0.0

    @property
    def rate(self) -> tuple[float, str]:
        """Median rate, and its unit: tokens a second, or samples where tokens are not known."""
        timed = [record for record in self._latest if record.seconds > 0]
        tokens = [record.tokens / record.seconds for record in timed if record.tokens is not None]
        if tokens:
            return median(tokens), "tok/s"
        return median([record.samples / record.seconds for record in timed] or [0.0]), "samples/s"

    @property
    def outside_s(self) -> float:
        """Median seconds of a step in operations that rest on no unit: every rank of a pipeline runs them."""
        return median(record.outside_s or 0.0 for record in self._latest) if self._latest else 0.0

    def speed_up(self, plan: Plan | None) -> float | None:
        """Seconds of work in a step over its seconds: one process would do it one after the other.

        None where ranks share layers or parameters: their work includes waiting for each other. So it may
        where nothing was planned.
        """
        work_s, step_s = self.median("work_s"), self.step_s
        if plan is None or plan.mesh.grid.share > 1 or plan.mesh.shard > 1 or work_s is None or not step_s:
            return None
        once_s = work_s - self.outside_s * (plan.mesh.pipeline - 1)
        return once_s * plan.mesh.data / step_s


def format_end(
    totals: RunTotals,
    plan: Plan | None,
    *,
    ended: str = "done",
    further: Sequence[str] = (),
    spent: Sequence[str] = (),
) -> str:
    steps = f"{totals.steps} step{'s' * (totals.steps != 1)}"
    if totals.last_step != totals.steps:
        steps += f" to step {totals.last_step}"
    loss = "" if totals.loss is None else f", loss {format_loss(totals.loss)}"
    rate, unit = totals.rate
    parts = [f"{ended}: {steps}{loss}", *([f"{format_rate(rate)} {unit}"] if rate else [])]
    predicted_s = plan.prediction.step_s if plan is not None and plan.prediction is not None else 0.0
    measured_s = totals.step_s
    speed_up = totals.speed_up(plan) or 0.0
    # What makes a step take twice its time makes the work in it longer, too, with which it is compared.
    if speed_up > ALONE and not 0 < 2 * predicted_s < measured_s:
        parts.append(f"{speed_up:.2f} times one process")
    step = f"step {format_seconds(measured_s)}"
    if totals.steps == 1:
        step += ", which traced and planned"
    if predicted_s > 0 and measured_s > 0 and totals.steps > 1:
        step += f", {beside_prediction(measured_s, predicted_s)}"
    lines = [" | ".join([*parts, step])]
    if predicted_s > 0 and measured_s > 0 and plan is not None and totals.steps > 1:
        lines += _why_they_part(totals, plan, measured_s / predicted_s)
    lines += [f"  {line}" for line in (*totals.slow_ranks(), *spent)]
    if further:
        lines.append("  " + "; ".join(further))
    return "\n".join(lines)


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
    work_s = totals.median("work_s")
    if work_s is None or not alone_s:
        return [begin]
    slower = work_s / alone_s
    if slower > _PARTED:
        why = "a rank was slow" if totals.slow_ranks() else "the machine was busy"
        return [f"{begin}: units took {slower:.1f} times what they took alone ({why})"]
    if slower < 1 / _PARTED:
        return [f"{begin}: units took {slower:.1f} times what they took alone (it was busy then)"]
    if ratio > 1:
        return [f"{begin}: units took what they took alone, so ranks waited longer than planned"]
    return [f"{begin}: units took what they took alone, so ranks waited less than planned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The outcome of a run; None where unknown.

    Attributes:
        steps: number of steps; one that was done again after a restart counts once.
        throughput: tokens or samples a second, all ranks together.
        step_predicted_s: the same, as the plan expected it.
        bubble: idle share of the ranks' time, 0 to 1.
        bubble_predicted: the same, as the plan expected it.
        spent: where its time has gone, lives before included.
        slow_rank: the rank that the others waited for most, and for which share of the time.
        left_out: a sentence about lines of the metrics that could not be read; empty where all could.
    """

    steps: int
    first_loss: float | None = None
    final_loss: float | None = None
    throughput: float | None = None
    throughput_unit: str = "tok/s"
    step_s: float | None = None
    step_predicted_s: float | None = None
    bubble: float | None = None
    bubble_predicted: float | None = None
    stages: str | None = None
    folder: Path | None = None
    spent: Spent | None = None
    slow_rank: str = ""
    left_out: str = ""


def format_summary(summary: RunSummary) -> str:
    """The summary as text; lines with unknown values are left out.

    >>> print(format_summary(RunSummary(
    ...     steps=200, first_loss=10.82, final_loss=3.2145, throughput=41_234.0, step_s=0.41,
    ...     step_predicted_s=0.43, bubble=0.112, bubble_predicted=0.1)))
    200 steps done
      loss        3.2145 (10.8200 at the first step)
      throughput  41.2k tok/s
      step        410 ms, 5% faster than predicted (430 ms)
      bubble      11% measured, 10% predicted
    """
    title = f"{summary.steps} step{'s' if summary.steps != 1 else ''} done"
    rows = align(list(_rows(summary))).splitlines()
    if summary.stages is not None:
        rows += summary.stages.splitlines()
    if summary.folder is not None:
        rows.append(f"run folder {show_path(summary.folder)}")
    if summary.left_out:
        rows.append(summary.left_out)
    return "\n".join([title, *(f"  {row}" for row in rows)])


def summarize(folder: RunFolder | str | os.PathLike[str]) -> RunSummary:
    """Reads the outcome of a run from its folder."""
    found = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder).absolute())
    lines, where = read_first_and_last(found.metrics_file), show_path(found.metrics_file)
    if not lines:
        raise UsageError(f"{where} holds no step. Run the training first, or name another folder.")
    totals = totals_of(record_of(line, where) for line in lines)
    rate, unit = totals.rate
    plan = Plan.read(found.plan_file) if found.plan_file.exists() else None
    return RunSummary(
        steps=totals.last_step - lines[0]["step"] + 1,
        first_loss=totals.first_loss,
        final_loss=totals.loss,
        throughput=rate or None,
        throughput_unit=unit,
        step_s=totals.step_s or None,
        step_predicted_s=totals.median("step_predicted_s"),
        bubble=totals.median("bubble_measured"),
        bubble_predicted=totals.median("bubble_predicted"),
        stages=None if plan is None else plan.table(),
        folder=found.path,
        spent=Spent.of_metrics(lines, where),
        slow_rank=totals.slowest,
        left_out=lines.left_out,
    )


def totals_of(records: Iterable[StepRecord]) -> RunTotals:
    totals = RunTotals()
    for record in records:
        totals.add(record)
    return totals


def _rows(summary: RunSummary) -> Iterator[tuple[str, str]]:
    if summary.final_loss is not None:
        first = summary.first_loss
        of = "" if first is None else f" ({format_loss(first)} at the first step)"
        yield "loss", format_loss(summary.final_loss) + of
    if summary.throughput is not None:
        yield "throughput", f"{format_rate(summary.throughput)} {summary.throughput_unit}"
    if summary.step_s is not None:
        yield "step", _against(format_seconds(summary.step_s), summary.step_predicted_s, summary.step_s)
    if summary.bubble is not None:
        expected = summary.bubble_predicted
        beside = "" if expected is None else f", {expected:.0%} predicted"
        yield "bubble", f"{summary.bubble:.0%} measured{beside}"
    elif summary.bubble_predicted is not None:
        yield "bubble", f"{summary.bubble_predicted:.0%} predicted"
    if summary.spent is not None:
        yield "time", str(summary.spent)
    if summary.slow_rank:
        yield "waited for", f"{summary.slow_rank} of the time of the last steps"


def _against(measured: str, predicted_s: float | None, measured_s: float) -> str:
    if not predicted_s or measured_s <= 0:
        return f"{measured} measured"
    return f"{measured}, {beside_prediction(measured_s, predicted_s)}"
