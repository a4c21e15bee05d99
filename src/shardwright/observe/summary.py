"""The closing summary of a run."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.errors import UsageError
from shardwright.observe.metrics import Metric, read_steps
from shardwright.observe.progress import format_loss, format_rate
from shardwright.observe.recorded import finite, number_or_none, to_number
from shardwright.observe.run_folder import RunFolder, show_path
from shardwright.plan import Plan
from shardwright.quantities import beside_prediction, format_seconds
from shardwright.text_table import align

__all__ = ["RunSummary", "format_summary", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The outcome of a run; None where unknown.

    Attributes:
        steps: number of steps; one that was done again after a restart counts once.
        first_loss: loss of the first step.
        final_loss: loss of the last step.
        throughput: tokens or samples a second, all ranks together.
        single_throughput: the same of one process.
        step_s: seconds of a step.
        step_predicted_s: the same, as the plan expected it.
        bubble: idle share of the ranks' time, 0 to 1.
        bubble_predicted: the same, as the plan expected it.
        stages: the plan's table of stages.
        left_out: a sentence about lines of the metrics that could not be read; empty where all could.
    """

    steps: int
    first_loss: float | None = None
    final_loss: float | None = None
    throughput: float | None = None
    throughput_unit: str = "tok/s"
    single_throughput: float | None = None
    step_s: float | None = None
    step_predicted_s: float | None = None
    bubble: float | None = None
    bubble_predicted: float | None = None
    stages: str | None = None
    folder: Path | None = None
    left_out: str = ""


def format_summary(summary: RunSummary) -> str:
    """The summary as text; lines with unknown values are left out.

    >>> print(format_summary(RunSummary(
    ...     steps=200, first_loss=10.82, final_loss=3.2145, throughput=41_234.0, single_throughput=23_100.0,
    ...     step_s=0.41, step_predicted_s=0.43, bubble=0.112, bubble_predicted=0.1)))
    200 steps done
      loss        3.2145 (10.8200 at the first step)
      throughput  41.2k tok/s
      speed-up    1.79x over one process (23.1k tok/s)
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


def summarize(
    folder: RunFolder | str | os.PathLike[str], *, single_throughput: float | None = None
) -> RunSummary:
    """Reads the outcome of a run from its folder.

    Rates are medians, without the first step, which traces and plans.
    """
    found = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder).absolute())
    records = read_steps(found.metrics_file)
    if not records:
        raise UsageError(
            f"{show_path(found.metrics_file)} holds no step. Run the training first, or name another folder."
        )
    where = show_path(found.metrics_file)
    steps = {finite(record.get("step"), "step", where) for record in records}
    steady = records[1:] or records
    tokens = _median(steady, Metric.TOKENS, where)
    plan = Plan.read(found.plan_file) if found.plan_file.exists() else None
    return RunSummary(
        steps=len(steps),
        first_loss=_loss(records[0], where),
        final_loss=_loss(records[-1], where),
        throughput=tokens if tokens is not None else _median(steady, Metric.SAMPLES, where),
        throughput_unit="tok/s" if tokens is not None else "samples/s",
        single_throughput=single_throughput,
        step_s=_median(steady, Metric.STEP, where),
        step_predicted_s=_median(steady, Metric.STEP_PREDICTED, where),
        bubble=_median(steady, Metric.BUBBLE, where),
        bubble_predicted=_median(steady, Metric.BUBBLE_PREDICTED, where),
        stages=None if plan is None else plan.table(),
        folder=found.path,
        left_out=records.left_out,
    )


def _rows(summary: RunSummary) -> Iterator[tuple[str, str]]:
    if summary.final_loss is not None:
        first = summary.first_loss
        of = "" if first is None else f" ({format_loss(first)} at the first step)"
        yield "loss", format_loss(summary.final_loss) + of
    if summary.throughput is not None:
        yield "throughput", f"{format_rate(summary.throughput)} {summary.throughput_unit}"
        single = summary.single_throughput
        if single:
            ratio = summary.throughput / single
            yield (
                "speed-up",
                f"{ratio:.2f}x over one process ({format_rate(single)} {summary.throughput_unit})",
            )
    if summary.step_s is not None:
        yield "step", _against(format_seconds(summary.step_s), summary.step_predicted_s, summary.step_s)
    if summary.bubble is not None:
        expected = summary.bubble_predicted
        beside = "" if expected is None else f", {expected:.0%} predicted"
        yield "bubble", f"{summary.bubble:.0%} measured{beside}"
    elif summary.bubble_predicted is not None:
        yield "bubble", f"{summary.bubble_predicted:.0%} predicted"


def _against(measured: str, predicted_s: float | None, measured_s: float) -> str:
    if not predicted_s or measured_s <= 0:
        return f"{measured} measured"
    return f"{measured}, {beside_prediction(measured_s, predicted_s)}"


def _median(records: list[dict[str, Any]], name: str, where: str) -> float | None:
    values = [value for record in records if (value := number_or_none(record, name, where)) is not None]
    return median(values) if values else None


def _loss(record: Mapping[str, Any], where: str) -> float | None:
    value = record.get(Metric.LOSS)
    return None if value is None else to_number(value, Metric.LOSS, where)
