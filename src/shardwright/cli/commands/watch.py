"""``shardwright watch``: follows a run in the terminal."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import say, show_text
from shardwright.cli.asking.run_path import listing, run_path
from shardwright.errors import UsageError
from shardwright.observe.console import Console
from shardwright.observe.following import Follower, newest_run
from shardwright.observe.run_folder import RunFolder, show_path
from shardwright.observe.run_record import go_on
from shardwright.observe.summary import format_summary, summarize

__all__ = ["watch"]

_PAUSE_S = 0.25

Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        callback=run_path,
        help="A run, by name or folder. Default: the newest in runs/.",
        show_default=False,
    ),
]


def watch(run: Run = None) -> None:
    """Follow a run until it ends: a progress line, and what it came to. Ctrl-C leaves it running.

    For example: shardwright watch runs/train
    """
    folder = _folder(run)
    try:
        with Follower(folder, Console(stream=sys.stdout)) as follower:
            _follow(folder, follower)
    except BrokenPipeError:
        # The reader has left (| head -1); the interpreter would complain when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _follow(folder: RunFolder, follower: Follower) -> None:
    try:
        show_text(f"run {folder}: {_state(follower)}")
        follower.begin()
        while follower.poll():
            time.sleep(_PAUSE_S)
        follower.end()
        show_text(_outcome(folder, follower))
    except KeyboardInterrupt:
        follower.end()
        say(f"no longer watched; the run goes on: shardwright watch {folder}")


def _folder(run: Path | None) -> RunFolder:
    if run is None:
        return newest_run(Path("runs"))
    if run.is_file():
        raise UsageError(f"{run} is a file. Give the run folder: shardwright watch {run.parent}")
    if not run.is_dir():
        raise UsageError(f"there is no run folder {run}. List them: {listing(run.parent)}")
    return RunFolder(run.absolute())


def _state(follower: Follower) -> str:
    record = follower.record
    if record is None:
        return "no record of its state"
    return f"{record.state}; {record.command}" if record.command else record.state


def _outcome(folder: RunFolder, follower: Follower) -> str:
    """How the run ended, what it came to, and how it would go on."""
    record = follower.record
    if record is None or record.state == "running":
        lines = ["the run has ended without a word: no process writes it any more"]
    else:
        code = f", exit code {record.exit_code}" if record.exit_code else ""
        lines = [f"{record.state}{code}"]
    if follower.steps:
        lines.append(format_summary(replace(summarize(folder), stages=None)))
    else:
        lines.append("no step was done")
    if folder.report_file.is_file():
        lines.append(f"report {show_path(folder.report_file)}")
    further = "" if record is None or record.did_finish else go_on(folder, record)
    return "\n".join([*lines, *filter(None, [further])])
