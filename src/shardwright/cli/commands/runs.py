"""``shardwright runs``: lists the runs of a folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.errors import ShardwrightError, UsageError
from shardwright.observe.progress import format_loss, format_rate
from shardwright.observe.summary import RunSummary, summarize
from shardwright.plan import align
from shardwright.units import format_seconds

__all__ = ["runs"]

RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="Folder that holds the run folders.")]


def runs(run_dir: RunDir = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs of a folder, the oldest first: steps, loss, speed, measured beside predicted.

    For example: shardwright runs, then shardwright show runs/NAME
    """
    if not run_dir.is_dir():
        raise UsageError(f"there is no folder {run_dir}. A run makes it: shardwright run -n 2 train.py")
    folders = sorted(
        (path for path in run_dir.iterdir() if (path / "logs").is_dir()),
        key=lambda path: path.stat().st_mtime,
    )
    found = [(folder, _summary(folder)) for folder in folders]
    if as_json:
        print_json([_as_document(folder, summary) for folder, summary in found])
    elif not found:
        show_text(f"no runs in {run_dir}")
    else:
        header = ["run", "steps", "loss", "speed", "step", "predicted", "bubble", "predicted"]
        show_text(align([header, *(_row(folder, summary) for folder, summary in found)]))


def _summary(folder: Path) -> RunSummary | str:
    """What a run came to, or why that is not known."""
    try:
        return summarize(folder)
    except UsageError:
        return "no step done"
    except ShardwrightError as error:
        return str(error).splitlines()[0]


def _as_document(folder: Path, summary: RunSummary | str) -> dict[str, object]:
    if isinstance(summary, str):
        return {"folder": str(folder), "problem": summary}
    return {**asdict(summary), "folder": str(folder)}


def _row(folder: Path, summary: RunSummary | str) -> list[str]:
    if isinstance(summary, str):
        return [folder.name, summary, *[""] * 6]

    def shown(value: float | None, form: str) -> str:
        if value is None:
            return "-"
        return format_seconds(value) if form == "s" else f"{value:.0%}"

    speed = (
        "-" if summary.throughput is None else f"{format_rate(summary.throughput)} {summary.throughput_unit}"
    )
    return [
        folder.name,
        str(summary.steps),
        "-" if summary.final_loss is None else format_loss(summary.final_loss),
        speed,
        shown(summary.step_s, "s"),
        shown(summary.step_predicted_s, "s"),
        shown(summary.bubble, "%"),
        shown(summary.bubble_predicted, "%"),
    ]
