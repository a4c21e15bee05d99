"""A limit on the memory of some processes together, kept by the kernel: a control group of their own.

Memory that several of them share counts once, which no limit of a single process (`RLIMIT_AS`) does. The
group is a child of the one that this process is in, and is removed at the end, whatever happens.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["MemoryLimit", "join", "missing_for_memory_limits", "remove"]

_MOUNT = Path("/sys/fs/cgroup")
_MOST_LOOKS = 100
_PAUSE_S = 0.02

# Removes the group as soon as its standard input ends, which it does also when this process is killed.
_CLEANER = """
import sys
from pathlib import Path
from memory_limit import remove
sys.stdin.read(1)
remove(Path(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of what is read and written, which differ between the two versions of control groups."""

    limit: str
    with_swap: str
    swap: str | None
    peak: str
    events: str


_V1 = _Files(
    limit="memory.limit_in_bytes",
    with_swap="memory.memsw.limit_in_bytes",
    swap=None,
    peak="memory.max_usage_in_bytes",
    events="memory.oom_control",
)
_V2 = _Files(
    limit="memory.max",
    with_swap="memory.swap.max",
    swap="0",
    peak="memory.peak",
    events="memory.events",
)


def missing_for_memory_limits() -> str | None:
    """What this machine lacks; None where it has everything."""
    if sys.platform != "linux":
        return f"{sys.platform} has no control groups"
    place = _place()
    if isinstance(place, str):
        return place
    try:
        with MemoryLimit(2**30):
            return None
    except OSError as error:
        return f"no control group can be made in {place[0]}: {error}"


class MemoryLimit:
    """A control group with a limit, while a ``with`` statement lasts.

    Args:
        num_bytes: of all processes that join it, together; the kernel kills those that want more.

    Raises:
        OSError: none can be made.

    Attributes:
        folder: of the group, which `join` takes.
    """

    def __init__(self, num_bytes: int):
        place = _place()
        if isinstance(place, str):
            raise OSError(place)
        parent, self._files = place
        self._num_bytes = num_bytes
        self.folder = parent / f"shardwright-{uuid.uuid4().hex[:8]}"
        self._cleaner: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._cleaner = subprocess.Popen(
            [sys.executable, "-c", _CLEANER, str(self.folder)],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        try:
            self.folder.mkdir()
            (self.folder / self._files.limit).write_text(str(self._num_bytes))
            with_swap = self.folder / self._files.with_swap
            if with_swap.exists():
                with_swap.write_text(self._files.swap or str(self._num_bytes))
            (self.folder / self._files.peak).read_text()  # Linux has it since 5.19
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is still in the group, and removes it."""
        if self._cleaner is not None:
            self._cleaner.communicate(b"x")
            failed, self._cleaner = self._cleaner.returncode != 0, None
            if failed:
                raise OSError(f"{self.folder} could not be removed. Remove it with: rmdir {self.folder}")

    @property
    def peak_bytes(self) -> int:
        """The most that its processes have had at a time."""
        return int((self.folder / self._files.peak).read_text())

    @property
    def num_killed(self) -> int:
        """Processes that the kernel has killed because they wanted more."""
        lines = (self.folder / self._files.events).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))


def join(folder: Path) -> None:
    """Has this process, and what it starts from now on, count in a group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def remove(folder: Path) -> None:
    """Kills what is in a group, and removes it."""
    for _ in range(_MOST_LOOKS):
        try:
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # some have not ended yet
            time.sleep(_PAUSE_S)
    raise OSError(f"{folder} is still in use")


def _place() -> tuple[Path, _Files] | str:
    """Where a group can be made, and how its files are called; else, why none can."""
    own = dict(_own_groups())
    if "memory" in own:
        return _MOUNT / "memory" / own["memory"].lstrip("/"), _V1
    if "" not in own:
        return "this process is in no control group for memory"
    # Where processes are, no child may have limits: so beside them.
    group = _MOUNT / own[""].lstrip("/")
    for parent in (group, group.parent):
        control = parent / "cgroup.subtree_control"
        if control.exists() and "memory" in control.read_text().split():
            return parent, _V2
    return f"neither {group} nor the group above it may limit the memory of others (cgroup.subtree_control)"


def _own_groups() -> list[tuple[str, str]]:
    """(controller, path) of this process; the second version has no controllers there."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found += [(controller, path) for controller in controllers.split(",")]
    return found
