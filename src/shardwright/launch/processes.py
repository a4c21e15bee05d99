"""Processes: what the kernel tells of them and of this host's cores, and the log of how workers ended."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

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
        fields = _stat(folder)
        if fields and int(fields[1]) == parent_pid:
            found.append(int(folder.name))
    return found


def is_stopped(pid: int) -> bool:
    """Says whether a process is held by SIGSTOP (or a debugger)."""
    fields = _stat(Path("/proc") / str(pid))
    return bool(fields) and fields[0] in ("T", "t")


def num_threads() -> int:
    """Counts the threads of this process, those that Python does not know included (1 where unknown)."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _stat(folder: Path) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` from the state on; the name before them may hold spaces and brackets."""
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # the process ended while we looked
        return []


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
