"""``shardwright show``: shows the outcome of a run, or a plan."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.run_path import is_plan, listing, read_plan, run_path
from shardwright.cli.commands.runs import summary_document
from shardwright.errors import UsageError
from shardwright.observe.metrics import read_json_lines
from shardwright.observe.plan_text import format_plan, format_plan_in_full
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.summary import format_summary, summarize
from shardwright.plan import Plan
from shardwright.text import printable

RunOrPlan = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_PLAN", callback=run_path, help="A run, by name or folder, or a plan file."
    ),
]


def show(folder: RunOrPlan, as_json: AsJson = False) -> None:
    """Show what a run came to, measured beside predicted: loss, speed, step, bubble; of a plan, all of it.

    For example: shardwright show runs/2026-11-20_12-58-37
    """
    if is_plan(folder):
        plan = read_plan(folder)
        show_text(plan.to_json() if as_json else format_plan_in_full(plan) + "\n", end="", folds=not as_json)
        return
    if not folder.is_dir():
        raise UsageError(f"there is no run folder {folder}. List them: {listing(folder.parent)}")
    found = RunFolder(folder.absolute())
    summary = summarize(found)
    chosen = Plan.read(found.plan_file) if found.plan_file.exists() else None
    if as_json:
        last = read_json_lines(found.metrics_file)[-1]
        stages = None if chosen is None else [stage.model_dump(mode="json") for stage in chosen.stages]
        own = {"folder": str(found.path), "stages": stages, "last_metrics": last}
        print_json({**summary_document(summary), **own})
        return
    show_text(format_summary(summary))
    if chosen is not None:
        show_text(format_plan(chosen).splitlines()[0])
        show_text("\n".join(f"  {printable(reason)}" for reason in chosen.why))
    show_text(f"files: {', '.join(_files(found))}")


def _files(folder: RunFolder) -> list[str]:
    known = (
        folder.config_file,
        folder.plan_file,
        folder.metrics_file,
        folder.events_file,
        folder.steps_file,
        folder.trace_file,
        folder.report_file,
        folder.logs_dir,
        folder.tensorboard_dir,
    )
    return [path.name + "/" * path.is_dir() for path in known if path.exists()]
