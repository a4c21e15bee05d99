"""Writes a run's report when it ends, and never makes the run fail."""

from collections.abc import Callable
from importlib.util import find_spec

from shardwright.errors import ShardwrightError
from shardwright.observe.console import Console
from shardwright.observe.run_folder import RunFolder, show_path
from shardwright.plan import Plan

__all__ = ["write_at_end"]

_MOST_ACTIONS = 10_000
"""Of a schedule that is played out at the end of a run: a second or so, for which the others wait."""


def write_at_end(
    folder: RunFolder, *, plan: Plan | None, console: Console, event: Callable[..., None]
) -> None:
    """Writes ``report.html``, or says why not and how to get it."""
    again = f"shardwright report {show_path(folder.path)}"
    if find_spec("plotly") is None:
        reason = "plotly is not installed. Run: pip install 'shardwright[report]'"
    elif plan is not None and 2 * len(plan.stages) * plan.schedule.microbatches > _MOST_ACTIONS:
        reason = "the schedule is long, and the run is not to wait for it"
    else:
        try:
            # Imported when it is needed: at the end of runs that write one.
            from shardwright.observe.report import write_report

            write_report(folder.path, folder.report_file)
        except Exception as error:  # whatever it is, the training is done and must not fail for a page
            told = str(error).rstrip(".")
            reason = told if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {told}"
        else:
            event("report_written")
            return
    event("report_not_written", reason=reason)
    console.status(f"no report.html: {reason}. To write it: {again}")
