"""Follows a run that another process makes: its progress as it comes, until it ends.

::

    metrics.jsonl ──► Tail ──► StepRecord ──► Progress ──► the terminal
    run.json ───────► state: running, finished, saved, stopped, failed
    .metrics.lock ──► the process that writes: a run that was killed says no more

Nothing is locked and nothing is written: a run does not notice who follows it.
"""

import os
import re
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from shardwright.errors import UsageError
from shardwright.files import DocumentError, UserFile, parse_json
from shardwright.observe.console import Console
from shardwright.observe.metrics import Metric, StepRecord
from shardwright.observe.progress import Progress
from shardwright.observe.recorded import number_or_none
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.run_record import RunRecord, read_record

__all__ = ["Follower", "Tail", "newest_run", "step_record"]

_GIB = 2**30
_HOLDER = re.compile(r"process (\d+) on (.+)")
_SILENT_S = 10.0
"""So long may no process hold a run that is said to be running: its first rank is on its way."""

_MOST_BYTES = 2**26  # of one reading


class Tail:
    """The new records of a file with one JSON object a line, which somebody else appends to.

    A line that is not whole yet comes with the next reading. If the file is another one, as of a run that
    began anew, its records come from the beginning. Lines that are no records are left out.

    Args:
        path: the file; it may come later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """The records since the last reading."""
        if self._file is not None and self._was_replaced(self._file):
            self.close()
        if self._file is None:
            self._file, self._rest = self._open(), b""
        if self._file is None:
            return []
        found: list[dict[str, Any]] = []
        while chunk := self._file.read(_MOST_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            found += [record for line in lines if (record := _record(line)) is not None]
        return found

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO | None:
        # A pipe would keep this process waiting.
        return self._path.open("rb") if self._path.is_file() else None

    def _was_replaced(self, file: BinaryIO) -> bool:
        here = os.fstat(file.fileno())
        try:
            there = self._path.stat()
        except OSError:
            return False  # it is being moved away; what is still open can be read to its end
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino) or here.st_size < file.tell()


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line.decode(errors="replace"), free_text=True)
    except DocumentError:
        return None
    return record if isinstance(record, dict) else None


class Follower:
    """Prints the progress of a run as it comes.

    Args:
        folder: of the run.
        console: where to.
        clock: seconds from any fixed point.
        wall: seconds since 1970.

    Attributes:
        steps: how many have come.
    """

    def __init__(
        self,
        folder: RunFolder,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._console = console
        self._clock = clock
        self._metrics = Tail(folder.metrics_file)
        self._progress: Progress | None = None
        # Of a run that nobody holds, it counts when it wrote last.
        self._held_at = clock() - max(0.0, wall() - _written_s(folder))
        self.steps = 0

    def begin(self) -> None:
        """Prints the last step that is there; what came before it is not told one by one."""
        self._show(self._metrics.read()[-1:])

    def poll(self) -> bool:
        """Prints what has come since; returns whether the run goes on."""
        goes_on = self._goes_on()
        self._show(self._metrics.read())
        return goes_on

    def end(self) -> None:
        """Prints the last line for good."""
        if self._progress is not None:
            self._progress.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()

    @property
    def record(self) -> RunRecord | None:
        """What the run says of itself; None where it says nothing."""
        return read_record(self._folder)

    def _show(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            step, world_size = step_record(record)
            if step is None:
                continue
            self.steps += 1
            if self._progress is None:
                self._progress = Progress(
                    self._console,
                    log_interval=None,
                    world_size=world_size,
                    total_steps=_total_steps(self._folder),
                    clock=self._clock,
                )
            self._progress.step_done(step)

    def _goes_on(self) -> bool:
        """Whether the run is not at its end, by what it says, or by the processes that hold its folder."""
        record = self.record
        if record is not None and record.state != "running":
            return False
        now = self._clock()
        if _is_held(self._folder):
            self._held_at = now
        return now - self._held_at < _SILENT_S


def step_record(record: Mapping[str, Any]) -> tuple[StepRecord | None, int]:
    """A line of ``metrics.jsonl`` as the step that it tells of, and the number of ranks.

    Returns:
        None for a line that tells of no step.

    >>> step, ranks = step_record({"step": 3, "time/step(s)": 0.5, "throughput/tokens(1/s)": 100.0})
    >>> step.step, step.seconds, step.tokens, ranks
    (3, 0.5, 50, 1)
    """
    number = record.get("step")
    if not isinstance(number, int) or isinstance(number, bool):
        return None, 1

    def known(name: str) -> float | None:
        try:
            return number_or_none(record, name, "")
        except UsageError:
            return None

    seconds = known(Metric.STEP) or 0.0
    totals = {name: known(name) for name in (Metric.SAMPLES, Metric.TOKENS, Metric.COMPUTE)}
    samples, tokens, flops = (None if rate is None else rate * seconds for rate in totals.values())
    memory, limit = known(Metric.MEMORY), known(Metric.MEMORY_LIMIT)
    of_rank, of_all = known(Metric.COMPUTE_PER_RANK), totals[Metric.COMPUTE]
    step = StepRecord(
        step=number,
        seconds=seconds,
        samples=round(samples or 0),
        loss=known(Metric.LOSS),
        tokens=None if tokens is None else round(tokens),
        flops=flops,
        bubble_measured=known(Metric.BUBBLE),
        memory_bytes=None if memory is None else (round(memory * _GIB),),
        memory_limit_bytes=None if limit is None else round(limit * _GIB),
    )
    return step, round(of_all / of_rank) if of_rank and of_all else 1


def newest_run(base: Path) -> RunFolder:
    """The run of a folder that wrote last; one that goes on comes before those that have ended.

    Raises:
        UsageError: there is none.
    """
    folders = (
        [RunFolder(path.absolute()) for path in base.iterdir() if (path / "logs").is_dir()]
        if base.is_dir()
        else []
    )
    if not folders:
        raise UsageError(f"there is no run in {base}. Begin one: shardwright run -n 2 train.py; or name one.")
    return max(folders, key=lambda folder: (_is_held(folder), _written_s(folder)))


def _written_s(folder: RunFolder) -> float:
    files = (folder.metrics_file, folder.events_file, folder.path)
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _is_held(folder: RunFolder) -> bool:
    """Whether a process that writes there is alive, as far as can be seen from here.

    The lock itself is not tried: a run that wants it at that moment would be refused. A process of another
    host cannot be seen, and counts as alive.
    """
    return any(_is_alive(folder.path / f".{part}.lock") for part in ("metrics", "logs"))


def _is_alive(lock: Path) -> bool:
    try:
        if not stat.S_ISREG(lock.stat().st_mode):
            return False
        with lock.open("rb") as file:
            holder = _HOLDER.fullmatch(file.read(300).decode(errors="replace").strip())
    except OSError:
        return False
    if holder is None:
        return False
    if holder[2] != socket.gethostname():
        return True
    try:
        os.kill(int(holder[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    return True


def _total_steps(folder: RunFolder) -> int | None:
    """How many steps the run makes, where its settings say so."""
    try:
        document = UserFile(folder.config_file, what="", error=UsageError).read_json()
    except UsageError:
        return None
    steps = document.get("steps") if isinstance(document, dict) else None
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None
