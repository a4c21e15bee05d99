"""Starts and ends a run, whatever front end the script takes."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from shardwright.config import Config
from shardwright.config.config import refuse_misplaced
from shardwright.errors import ShardwrightError, UsageError
from shardwright.plan import Plan
from shardwright.run.context import Context, context, is_initialized, set_context
from shardwright.run.joining import joined
from shardwright.run.joint_calls import prepare
from shardwright.run.launch_settings import given_settings
from shardwright.run.reporting import Facts, Reporter

_ContextT = TypeVar("_ContextT", bound=Context)


def settings_of_call(config: Any, others: Mapping[str, Any]) -> tuple[Config, Plan | None]:
    """The settings of a script's call of ``init``, and the plan to follow; refuses a second call."""
    refuse_misplaced("sw.init", others, takes=("config",))
    if is_initialized():
        raise UsageError("init was called before. Call it once; shutdown() ends a run.")
    be_brief()
    return given_settings(config)


def begun(
    settings: Config,
    plan: Plan | None,
    *,
    kind: type[_ContextT],
    facts: Callable[[_ContextT], Facts],
    check: Callable[[_ContextT], None] | None = None,
) -> _ContextT:
    """A run of joined ranks, which reports; collective over them."""
    made = joined(settings, plan, kind=kind)
    if check is not None:
        check(made)
    prepare(made)
    made.reporter = Reporter(made, facts(made))
    return made


def shutdown() -> None:
    """Ends a run: a new one can be started with `init`. Process groups stay, for that one too."""
    if is_initialized():
        current = context()
        if current.watch.whereabouts is not None:
            current.watch.whereabouts.close(f"has called {ShardwrightError.library}.shutdown()")
        if current.reporter is not None:
            current.reporter.close()
        current.cleanup.close()  # a save under way is waited for, with messages between ranks
        if current.links.local_peers is not None:
            current.links.local_peers.close()
    set_context(None)


# ---- errors that all ranks have ----


def be_brief() -> None:
    """Has all ranks but the first print errors of this library in one line, which says where they arose.

    `shardwright run` folds the texts of its ranks itself. Under torchrun, srun and mpirun a wrong setting
    would print as many tracebacks as there are ranks.
    """
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0")
    if rank == "0" or "SHARDWRIGHT_RUN_DIR" in os.environ or sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, ShardwrightError) and error.__cause__ is None:
            sys.stderr.write(f"[rank {rank}] {_line_of(frames)}{kind.__name__}: {error}\n")
        else:
            sys.__excepthook__(kind, error, frames)

    sys.excepthook = hook


_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def _line_of(frames: TracebackType | None) -> str:
    """The innermost line of the script, and not of a library."""
    script = os.path.dirname(os.path.abspath(sys.argv[0]))
    for frame in reversed(traceback.extract_tb(frames)):
        file = os.path.abspath(frame.filename)
        if file.startswith(script + os.sep) and "site-packages" not in file:
            return f"{os.path.relpath(frame.filename, script)}:{frame.lineno}: "
    return ""
