"""``shardwright explain``: explains a plan or a run."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.run_path import run_path
from shardwright.observe.plan_text import MEMORY_COLUMNS, alternatives_table, format_plan, memory_cells
from shardwright.observe.report.data import Predicted, ReportData, gather
from shardwright.observe.report.parts import Compared
from shardwright.planner.replay import Sensitivity, sensitivities
from shardwright.quantities import format_bytes, format_seconds
from shardwright.text import align

_BAR = 30


def format_explanation(data: ReportData) -> str:
    """The explanation of a run or plan; unknown values are left out, and `data.notes` say why."""
    blocks = []
    if data.plan is not None:
        blocks.append(format_plan(data.plan))
    blocks += _measured(data)
    if data.predicted is not None and data.plan is not None:
        blocks.append(_block("what the step is spent on", _waterfall(data.predicted)))
        if data.predicted.stack:
            blocks.append(_block("memory at the peak of each rank", _memory(data.predicted)))
        blocks.append(_block("what would change it", _sensitivities(sensitivities(data.plan))))
    if data.plan is not None and data.plan.alternatives:
        blocks.append(_block("runners-up", alternatives_table(data.plan)))
    return "\n\n".join([*blocks, *data.notes])


def explanation_document(data: ReportData) -> dict[str, Any]:
    """The same for programs: the data of the report without timelines, with the sensitivities."""
    document = data.to_dict()
    for name in ("measured_timeline", "steps"):
        document.pop(name)
    if document["predicted"] is not None:
        for name in ("timeline", "memory_over_time"):
            document["predicted"].pop(name)
    document["sensitivities"] = []
    if data.plan is not None and data.predicted is not None:
        document["sensitivities"] = [
            {"name": s.name, "step_s": s.step_s, "saved_s": s.saved_s, "assumption": s.assumption}
            for s in sensitivities(data.plan)
        ]
    return document


def _measured(data: ReportData) -> Iterator[str]:
    rows = [row for row in (*data.compared, *data.spent) if row.measured is not None]
    if rows:
        header = ["", "predicted", "measured", "above prediction"]
        table = align([header, *(_compared_row(row) for row in rows)])
        yield _block("predicted beside measured (parts of a step: mean of the ranks)", table)


def _compared_row(row: Compared) -> list[str]:
    form = format_seconds if row.name.endswith("(s)") else format_bytes
    shown = ["-" if value is None else form(value) for value in (row.predicted, row.measured)]
    above = row.remark or ("-" if row.above is None else f"{row.above:+.1%}")
    return [row.name.rsplit(" (", 1)[0], *shown, above]


def _waterfall(predicted: Predicted) -> str:
    step_s = predicted.waterfall.step_s
    rows = []
    for part in predicted.waterfall.parts:
        share = part.seconds / step_s if step_s else 0.0
        # At least one mark: a part that is listed is there.
        bar = "█" * max(1, round(abs(share) * _BAR))
        rows.append([part.name, format_seconds(part.seconds), f"{share:.1%}", bar])
    rows.append(["predicted step", format_seconds(step_s), "100.0%", "without the optimizer's update"])
    if predicted.update_s:
        rows.append(["optimizer's update", format_seconds(predicted.update_s), "", "after the step"])
    return align(rows)


def _memory(predicted: Predicted) -> str:
    """A row for each run of ranks that are alike."""
    rows = [["ranks", *MEMORY_COLUMNS]]
    numbered = enumerate(predicted.stack)
    for memory, group in groupby(numbered, key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in group]
        name = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        rows.append([name, *memory_cells(memory)])
    limit = f"limit {format_bytes(predicted.limit_bytes)}" if predicted.limit_bytes else "no limit is known"
    return f"{align(rows)}\n{limit}"


def _sensitivities(found: Sequence[Sensitivity]) -> str:
    rows = [["as planned", format_seconds(found[0].step_s + found[0].saved_s), "", ""]]
    for row in found:
        before_s = row.step_s + row.saved_s
        change = row.step_s / before_s - 1 if before_s else 0.0
        note = f"assuming {row.assumption}" if row.assumption else ""
        shown = f"{change:+.1%}" if abs(change) >= 5e-4 else "0%"
        rows.append([row.name, format_seconds(row.step_s), shown, note])
    return align(rows)


def _block(title: str, text: str) -> str:
    return "\n".join([title, *(f"  {line}" for line in text.splitlines())])


def explain(
    plan_or_run: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN_OR_RUN", callback=run_path, help="A plan file, or a run, by name or folder."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Say why this plan, what its step is spent on, where memory goes, and what would make it faster.

    For example: shardwright explain runs/2026-11-20_12-58-37
    """
    data = gather(plan_or_run)
    if as_json:
        print_json(explanation_document(data))
    else:
        show_text(format_explanation(data))
