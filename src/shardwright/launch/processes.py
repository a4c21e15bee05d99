"""Processes: the text they are started with, what the kernel tells of them, how workers ended."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError
from shardwright.flight_record import stat_of
from shardwright.quantities import MOST_RANKS_OF_HOST
from shardwright.text import control_in, shown

__all__ = [
    "check_count",
    "check_process",
    "check_processes",
    "check_variables",
    "refuse_half_characters",
    "shown",
    "why_no_name",
    "why_no_text",
    "why_no_variable",
    "without_too_long",
]

_NUL = "it has a NUL character, at which text of a process ends"
_SURROGATE = "it has half a character of Unicode (a lone surrogate), which UTF-8 cannot express"
# Linux: MAX_ARG_STRLEN, 32 pages, of which the NUL at the end takes one byte.
_MOST_BYTES = 32 * 4096 - 1


def why_no_text(text: str) -> str | None:
    """Why no process can get a text as one of its words; None where it can.

    >>> why_no_text("it's 5 $") is None
    True
    >>> why_no_text("a\\0b")
    'it has a NUL character, at which text of a process ends'
    """
    return _NUL if "\0" in text else _why_no_utf8(text) or _why_too_long(text)


def why_no_variable(name: str, value: str) -> str | None:
    """Why no process can get a value as that of a variable; None where it can."""
    return why_no_text(value) or _why_too_long(f"{name}={value}")


def without_too_long(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that a process can have; others are left out, with a warning."""
    kept = {name: value for name, value in variables.items() if _why_too_long(f"{name}={value}") is None}
    if left := sorted(variables.keys() - kept.keys()):
        warnings.warn(
            f"{', '.join(left)} {'are' if len(left) > 1 else 'is'} not set: Linux gives a process at most "
            f"{_MOST_BYTES:,} bytes in one variable. The script gets its words all the same.",
            stacklevel=2,
        )
    return kept


def why_no_name(name: str) -> str | None:
    """Why no variable can have a name; None where it can.

    >>> why_no_name("a=b")
    "it has '=', with which the value of a variable begins"
    """
    if not name:
        return "it is empty"
    if "=" in name:
        return "it has '=', with which the value of a variable begins"
    if (reason := why_no_text(name)) is not None:
        return reason
    control = control_in(name)
    return None if control is None else f"it has a control character, {control}"


def check_variables(given: Mapping[str, str], *, what: str) -> None:
    """Checks variables that a user has given."""
    for name, value in given.items():
        if (reason := why_no_name(name)) is not None:
            raise ConfigError(f"{what} has a variable {shown(name)}, but {reason}. Give it another name.")
        if (reason := why_no_variable(name, value)) is not None:
            raise ConfigError(f"{name} in {what} is {shown(value)}, but {reason}. Give another value.")


def check_process(words: list[str], variables: Mapping[str, str]) -> None:
    """Checks all that a process would get, paths included, which need not be UTF-8 on this machine."""
    entries = [("a word of the script", word, word) for word in words]
    entries += [(name, value, f"{name}={value}") for name, value in variables.items()]
    for what, text, entry in entries:
        if "\0" in text or not _has_bytes(text):
            reason = why_no_text(text)
            raise ConfigError(f"{what} would be {text!r}, but {reason}. Give it another value, or rename it.")
        if (reason := _why_too_long(entry)) is not None:
            raise ConfigError(
                f"{what} would be {shown(text)}, but {reason}. SM_HPS and SM_TRAINING_ENV have all "
                "hyperparameters together, SM_USER_ARGS all words."
            )


def refuse_half_characters(manifest: str) -> None:
    """Refuses what a job is submitted as where its folders have names that are not UTF-8."""
    if _why_no_utf8(manifest) is not None:
        raise ConfigError(
            "a folder or file of this job has a name that is not UTF-8, so that no manifest can have it. "
            "Rename it, or run the job on this machine."
        )


def _why_no_utf8(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE
    return None


def _why_too_long(entry: str) -> str | None:
    num_bytes = len(os.fsencode(entry))
    if num_bytes <= _MOST_BYTES:
        return None
    return (
        f"it takes {num_bytes:,} bytes, and Linux gives a process at most {_MOST_BYTES:,} in one word or "
        "variable. Put what is long in a file, in a channel for example, and give its path"
    )


def _has_bytes(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def check_count(name: str, value: Any, *, most: int, least: int = 1) -> int:
    """A whole number in its range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {shown(value)}, but it must be a whole number from {least} to {most}.")
    return value


def check_processes(value: Any) -> int:
    """Checks the number of ranks on a host; raises as `check_count`."""
    return check_count("processes_per_host", value, most=MOST_RANKS_OF_HOST)


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent ends, however it ends (Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died between the fork and the call above: then no signal will come.
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends, to find them (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def children(parent_pid: int) -> list[int]:
    """Lists the living and unreaped children of a process; empty where there is no ``/proc``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = stat_of(int(folder.name)).split()
        if fields and int(fields[1]) == parent_pid:
            found.append(int(folder.name))
    return found


def num_threads() -> int:
    """Counts the threads of this process, those that Python does not know included (1 where unknown)."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


SAVED_AND_REQUEUE = 75
"""The exit code of a worker that saved its state on request and wants to be started again later."""


EXITS_VARIABLE = "SHARDWRIGHT_EXITS"
"""Names the file into which a launcher writes how its ranks ended, for one who started several launchers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The end of one worker.

    Attributes:
        life: 0 for the first start on this host, 1 after the first restart. The agent's restart count will
            not do: it leaves out restarts that another host caused.
        exit_code: as `subprocess` counts: minus the signal's number where a signal ended it.
        at_s: when (`time.monotonic`, one clock for this host).
        signal_number: what the supervisor had passed on to it before, if anything.
        was_killed: it did not end in time, so the supervisor killed it.
        patience_s: how much time it was given, from the last signal on.
        error: the last traceback that it wrote, or its last words.
        steps: training steps that it had made, those before a resume among them; None: it did not say.
        world_size: ranks of the run, on all hosts.
    """

    rank: int
    local_rank: int
    life: int
    exit_code: int
    at_s: float
    seconds: float
    signal_number: int | None = None
    was_killed: bool = False
    patience_s: float = 0.0
    error: str = ""
    steps: int | None = None
    world_size: int = 1
    log: str


class ExitLog:
    """The file; one line a worker and life."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def append(self, worker_exit: WorkerExit) -> None:
        """Adds a line in one piece, so that lines of several processes do not mix."""
        line = json.dumps(asdict(worker_exit)) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def progress_file(self, local_rank: int) -> Path:
        """Where a rank notes how far it has come."""
        return self._path.with_name(f"progress{local_rank}")

    def remove(self) -> None:
        """Removes the file and its folder; several workers may do so at once."""
        shutil.rmtree(self._path.parent, ignore_errors=True)

    def read(self) -> list[WorkerExit]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return []
        return [found for line in text.splitlines() if (found := _read(line)) is not None]

    def of_life(self, life: int) -> list[WorkerExit]:
        return [worker_exit for worker_exit in self.read() if worker_exit.life == life]

    def next_life(self, local_rank: int) -> int:
        """The life that begins now for a local rank; the agent begins one when the one before has ended."""
        return sum(worker_exit.local_rank == local_rank for worker_exit in self.read())

    def of_last_life(self) -> list[WorkerExit]:
        """The exits of the last known life."""
        return self.of_life(max((worker_exit.life for worker_exit in self.read()), default=0))


def _read(line: str) -> WorkerExit | None:
    """Reads a line; None if it is torn, by a node that lost power, or somebody else's."""
    try:
        return WorkerExit(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
