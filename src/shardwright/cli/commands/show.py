"""``shardwright show``: shows the outcome of a run."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.run_path import listing, run_path
from shardwright.cli.showing.summary_document import summary_document
from shardwright.errors import UsageError
from shardwright.observe.jsonl import read_json_lines
from shardwright.observe.plan_text import format_plan
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.summary import format_summary, summarize
from shardwright.plan import Plan
from shardwright.printable import printable

__all__ = ["show"]

Folder = Annotated[Path, typer.Argument(metavar="RUN", callback=run_path, help="A run, by name or folder.")]


def show(folder: Folder, as_json: AsJson = False) -> None:
    """Show what a run came to: loss, speed, step time and bubble as measured beside the predictions.

    For example: shardwright show runs/2026-11-20_12-58-37
    """
    if folder.is_file():
        raise UsageError(f"{folder} is a file. Give the run folder: shardwright show {folder.parent}")
    if not folder.is_dir():
        raise UsageError(f"there is no run folder {folder}. List them: {listing(folder.parent)}")
    found = RunFolder(folder.absolute())
    summary = summarize(found)
    plan = Plan.read(found.plan_file) if found.plan_file.exists() else None
    if as_json:
        last = read_json_lines(found.metrics_file)[-1]
        stages = None if plan is None else [stage.model_dump(mode="json") for stage in plan.stages]
        own = {"folder": str(found.path), "stages": stages, "last_metrics": last}
        print_json({**summary_document(summary), **own})
        return
    show_text(format_summary(summary))
    if plan is not None:
        show_text(format_plan(plan).splitlines()[0])
        show_text("\n".join(f"  {printable(reason)}" for reason in plan.why))
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
