"""The processes of one contestant: they wait, without taking anything of the machine, until it is their turn.

::

    race ── "run" ──▶ first rank of the team ──▶ its other ranks
         ◀── seconds ──

Its processes run `team_ranks`.
"""

import select
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

import team_ranks
from duel import Run
from models import Task
from team_ranks import Entry

__all__ = ["Team"]

_END_S = 30.0


class Team:
    """One contestant's processes, from ``with`` to its end.

    Args:
        name: see `contestant.contestant`.
        task: what is trained.
        ranks: processes.
        microbatches: parts into which a batch is split.
    """

    def __init__(self, name: str, task: Task, *, ranks: int, microbatches: int):
        self.name = name
        self._spec = (name, task, ranks, microbatches)
        self._connection: Connection | None = None

    def __enter__(self) -> "Team":
        self._folder = tempfile.TemporaryDirectory(prefix="race-")
        folder = Path(self._folder.name)
        spec, address, self._log = folder / "spec", folder / "socket", folder / "log"
        spec.write_bytes(cloudpickle.dumps(self._spec))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        with self._log.open("wb") as log:
            command = [sys.executable, team_ranks.__file__, str(address), str(spec)]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()  # which the team takes for the end
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def enter(self) -> Entry:
        """Builds the contestant, anew if it was there."""
        return Entry(**self._ask("enter"))

    def run(self) -> Run:
        """A stretch of training: seconds of one of its steps."""
        run: Run = self._ask("run")
        return run

    def loss(self) -> float:
        """Of the last step."""
        loss: float = self._ask("loss")
        return loss

    def _ask(self, command: str) -> Any:
        try:
            if self._connection is None:
                self._connection = self._called()
            self._connection.send(command)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.wait(_END_S)
            log = self._log.read_text(errors="replace")
            raise RuntimeError(f"{self.name} failed at {command!r}:\n{log}") from error

    def _called(self) -> Connection:
        """Waits until the first rank of the team calls."""
        while not select.select([self._listener], [], [], 0.1)[0]:
            if self._process.poll() is not None:
                raise EOFError
        return Connection(self._listener.accept()[0].detach())
