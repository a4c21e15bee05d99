"""``shardwright status``: shows what each rank of a run does now, or did last."""

import time
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, clear_screen, print_json, show_text
from shardwright.cli.asking.run_path import listing, run_path
from shardwright.errors import UsageError
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.run_record import read_record
from shardwright.observe.run_status import RankStatus, format_actions, format_statuses, read_statuses

_EACH_S = 1.0
_LOOKS_WITHOUT_RANKS = 60
"""Ranks that start again are none for a while; a killed launcher leaves a run that seems to go on."""

Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", callback=run_path, help="A run, by name or folder, also of a while ago."),
]
Rank = Annotated[
    int | None, typer.Option("--rank", min=0, help="One rank: its last 50 actions, and its stack.")
]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Show it again each second, until the run ends.")
]


def status(run: Run, rank: Rank = None, follow: Follow = False, as_json: AsJson = False) -> None:
    """Show what each rank does now, since when, and whom it waits for; or did last, before it was killed.

    For example: shardwright status train, then shardwright status train --rank 1
    """
    if not run.is_dir():
        raise UsageError(f"there is no run folder {run}. List them: {listing(run.parent)}")
    folder = RunFolder(run.absolute())
    looks_left = _LOOKS_WITHOUT_RANKS
    try:
        while looks_left:
            found = _chosen(read_statuses(folder), rank)
            goes_on = _show(found, in_full=rank is not None, as_json=as_json, clears=follow)
            record = read_record(folder)
            if not follow or not (goes_on or (record is not None and record.state == "running")):
                return
            looks_left = _LOOKS_WITHOUT_RANKS if goes_on else looks_left - 1
            time.sleep(_EACH_S)
    except KeyboardInterrupt:
        return


def _chosen(statuses: tuple[RankStatus, ...], rank: int | None) -> list[RankStatus]:
    chosen = [status for status in statuses if rank in (None, status.rank)]
    if not chosen:
        known = ", ".join(str(status.rank) for status in statuses)
        raise UsageError(f"rank {rank} has left no word in this run folder; there are {known}.")
    return chosen


def _show(statuses: list[RankStatus], *, in_full: bool, as_json: bool, clears: bool) -> bool:
    """Returns whether a rank goes on."""
    if as_json:
        print_json([status.to_document() for status in statuses])
    else:
        parts = [format_statuses(statuses), *(format_actions(status) for status in statuses if in_full)]
        if clears:
            clear_screen()
        show_text("\n".join(parts))
    return any(status.state not in ("ended", "gone") for status in statuses)
