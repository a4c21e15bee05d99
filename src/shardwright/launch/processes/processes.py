"""Asks the kernel about processes: parents, groups, orphans, threads."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = ["adopt_orphans", "children", "die_with_parent", "is_stopped", "kill_group", "num_threads"]

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
    """Kills a process and the rest of the process group that it leads."""
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
