"""The exit log: how workers ended, appended by all supervisors of a host."""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["EXITS_VARIABLE", "SAVED_AND_REQUEUE", "ExitLog", "WorkerExit"]

SAVED_AND_REQUEUE = 75
"""The exit code of a worker that saved its state on request and wants to be started again later."""


EXITS_VARIABLE = "SHARDWRIGHT_EXITS"
"""Names the file into which a launcher writes how its ranks ended, for one who started several launchers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The end of one worker.

    Attributes:
        local_rank: its rank on this host.
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
        """All workers that have ended until now."""
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
