"""``shardwright runs``: lists the runs of a folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.errors import ShardwrightError, UsageError
from shardwright.observe.console import format_loss, format_rate
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.run_record import read_record, saved_step
from shardwright.observe.summary import RunSummary, summarize
from shardwright.quantities import format_seconds
from shardwright.text import align

RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="Folder that holds the run folders.")]


def runs(run_dir: RunDir = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs of a folder, the oldest first: state, steps, loss, speed, measured beside predicted.

    For example: shardwright runs, then shardwright show runs/NAME
    """
    if not run_dir.is_dir():
        raise UsageError(f"there is no folder {run_dir}. A run makes it: shardwright run -n 2 train.py")
    folders = sorted(
        (path for path in run_dir.iterdir() if (path / "logs").is_dir()),
        key=lambda path: (path / "logs").stat().st_mtime,  # reports change the folder around it
    )
    found = [(folder, _summary(folder)) for folder in folders]
    if as_json:
        print_json([_as_document(folder, summary) for folder, summary in found])
    elif not found:
        show_text(f"no runs in {run_dir}")
    else:
        header = [
            "run",
            "state",
            "steps",
            "loss",
            "speed",
            "step",
            "predicted",
            "bubble",
            "productive",
            "slow",
        ]
        rows = [_row(folder, summary) for folder, summary in found]
        if not any(row[-1] for row in rows):
            header, rows = header[:-1], [row[:-1] for row in rows]
        show_text(align([header, *rows]))


def _summary(folder: Path) -> RunSummary | str:
    """The result of a run, or the reason why it is not known."""
    try:
        return summarize(folder)
    except UsageError:
        return "no step done"
    except ShardwrightError as error:
        return str(error).splitlines()[0]


def _as_document(folder: Path, summary: RunSummary | str) -> dict[str, object]:
    known = RunFolder(folder.absolute())
    record, saved = read_record(known), saved_step(known)
    told = {
        "folder": str(folder),
        "state": None if record is None else record.state,
        "command": None if record is None else record.command,
        "saved_step": None if saved is None else saved.step,
    }
    known_numbers = {"problem": summary} if isinstance(summary, str) else summary_document(summary)
    return {**known_numbers, **told}


def _state(folder: Path) -> str:
    """How a run ended, and where it would go on; - for one without a record."""
    known = RunFolder(folder.absolute())
    record, saved = read_record(known), saved_step(known)
    if record is None:
        return "-"
    if saved is None or record.did_finish:
        return record.state
    return f"saved {saved}" if record.state == "saved" else f"{record.state}, saved {saved}"


def _row(folder: Path, summary: RunSummary | str) -> list[str]:
    if isinstance(summary, str):
        return [folder.name, _state(folder), summary, *[""] * 7]

    def shown(value: float | None, form: str) -> str:
        if value is None:
            return "-"
        return format_seconds(value) if form == "s" else f"{value:.0%}"

    speed = (
        "-" if summary.throughput is None else f"{format_rate(summary.throughput)} {summary.throughput_unit}"
    )
    return [
        folder.name,
        _state(folder),
        str(summary.steps),
        "-" if summary.final_loss is None else format_loss(summary.final_loss),
        speed,
        shown(summary.step_s, "s"),
        shown(summary.step_predicted_s, "s"),
        shown(summary.bubble, "%"),
        shown(None if summary.spent is None else summary.spent.share, "%"),
        summary.slow_rank,
    ]


def summary_document(summary: RunSummary) -> dict[str, Any]:
    """The numbers of a summary, with their units in their names, and without its table.

    >>> document = summary_document(RunSummary(steps=3, throughput=8.0, throughput_unit="samples/s"))
    >>> document["samples_per_s"], "stages" in document
    (8.0, False)
    """
    spent = (
        {} if summary.spent is None else {"productive_share": summary.spent.share, **asdict(summary.spent)}
    )
    rate = "tokens_per_s" if summary.throughput_unit == "tok/s" else "samples_per_s"
    document = {**asdict(summary), "spent": spent or None, "slow_rank": summary.slow_rank or None}
    for name in ("stages", "throughput_unit"):
        del document[name]
    document[rate] = document.pop("throughput")
    return document
