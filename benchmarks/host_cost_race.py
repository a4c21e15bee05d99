"""One row of `host_cost.py`: ours and its rivals, in turns.

::

    race ── row ──▶ side "ours" ──▶ its ranks          each turn: "ours", "plain", "1F1B", then backwards
         ── row ──▶ side "rivals" ──▶ its ranks

A side is a fork server whose ranks begin afresh for each row. There are two, because the library replaces
functions of torch in its processes.
"""

import contextlib
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from duel import Run, Times, alternate, ratios
from host_cost_profile import Called, StepProfile
from host_cost_ranks import Row, Turn, serve
from shardwright.testing import run_ranks

__all__ = ["Result", "Sides"]

_LONGEST_S, _END_S = 3600.0, 30.0
_STRETCH_S, _MOST_STEPS = 0.15, 30
_FIRST_STEPS, _WARM_UP_TURNS = 3, 3
_PROFILE_WARM_UP_STEPS = 10
_SAME_LOSS = 2e-3


@dataclass(frozen=True, slots=True)
class Result:
    """How the contestants of a row did.

    Attributes:
        row: what was measured.
        times: processor time of the main thread, the mean of a contestant's ranks, round by round.
        turns: all that was measured, round by round.
    """

    row: Row
    times: dict[str, Times]
    turns: dict[str, list[Turn]]

    def ratio(self, rival: str) -> float:
        """Processor time of ours / the rival's, the median of the rounds.

        Of a loop that runs on one rank the others' share is counted: the mean of ranks that do nothing.
        """
        return statistics.median(ratios(self.times["ours"], self.times[rival]))

    def wall_ratio(self, rival: str) -> float:
        """The same by the clock, where a plain loop is not divided."""
        pairs = zip(self.turns["ours"], self.turns[rival], strict=True)
        return statistics.median(ours.wall_s / other.wall_s for ours, other in pairs)

    def wall_s(self, name: str) -> float:
        """Seconds of a step by the clock, the median."""
        return statistics.median(turn.wall_s for turn in self.turns[name])

    def process_s(self, name: str) -> float:
        """Processor time of all threads of a rank, the mean of the ranks, the median of the rounds."""
        return statistics.median(statistics.fmean(turn.process_s) for turn in self.turns[name])

    def busiest_s(self, name: str) -> float:
        """Processor time of the main thread of the busiest rank, the median."""
        return statistics.median(max(turn.cpu_s) for turn in self.turns[name])


class Sides:
    """Both, from ``with`` to its end."""

    def __enter__(self) -> "Sides":
        self._stack = contextlib.ExitStack()
        self._ours, self._rivals = (self._stack.enter_context(_Side()) for _ in range(2))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def measure(self, row: Row, *, rounds: int) -> Result:
        """Runs a row.

        Raises:
            RuntimeError: a rank failed, or a contestant computed another loss than the others.
        """
        sides = {"ours": self._ours} | dict.fromkeys(row.rivals, self._rivals)
        self._ours.begin(row, ("ours",))
        self._rivals.begin(row, row.rivals)
        self._ours.wait()
        self._rivals.wait()
        first = {name: side.turn(name, _FIRST_STEPS) for name, side in sides.items()}
        losses = {name: turn.loss for name, turn in first.items()}
        if max(losses.values()) - min(losses.values()) > _SAME_LOSS * abs(losses["ours"]):
            raise RuntimeError(f"{row}: the contestants computed different losses, {losses}")
        steps = {name: _num_steps(turn) for name, turn in first.items()}
        turns: dict[str, list[Turn]] = {name: [] for name in sides}

        def run(name: str) -> Run:
            turn = sides[name].turn(name, steps[name])
            steps[name] = _num_steps(turn)
            turns[name].append(turn)
            return statistics.fmean(turn.cpu_s), turn.foreign

        runs: dict[str, Callable[[], Run]] = {name: lambda n=name: run(n) for name in sides}  # type: ignore[misc]
        times = alternate(runs, rounds=rounds, warm_up=_WARM_UP_TURNS)
        self._ours.end()
        self._rivals.end()
        return Result(row, times, {name: each[_WARM_UP_TURNS:] for name, each in turns.items()})

    def profile(self, row: Row, *, num_steps: int) -> list[StepProfile]:
        """Where the time of our steps goes, of each rank."""
        self._ours.begin(row, ("ours",))
        self._ours.wait()
        self._ours.turn("ours", _PROFILE_WARM_UP_STEPS)
        answers = self._ours.ask(("profile", "ours", num_steps))
        self._ours.end()
        return [
            StepProfile(**{**each, "functions": [Called(**one) for one in each["functions"]]})
            for each in answers
        ]


class _Side:
    """A process that starts ranks, and what is said to it and to them."""

    def __enter__(self) -> "_Side":
        self._folder = tempfile.TemporaryDirectory(prefix="host-cost-")
        self._address = str(Path(self._folder.name, "socket"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self._log = Path(self._folder.name, "log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._address], stdout=log, stderr=subprocess.STDOUT
            )
        self._control = self._called()
        return self

    def __exit__(self, *error: Any) -> None:
        self._listener.close()
        self._control.close()  # which the side takes for the end
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def begin(self, row: Row, names: tuple[str, ...]) -> None:
        """Starts ranks for a row."""
        self._control.send((row, names, self._address))

    def wait(self) -> None:
        """Returns when the ranks are ready to take turns."""
        self._ranks = self._called()

    def turn(self, name: str, num_steps: int) -> Turn:
        """Of one contestant."""
        return Turn(**self.ask(("turn", name, num_steps)))

    def ask(self, question: Any) -> Any:
        """What the first rank answers."""
        try:
            self._ranks.send(question)
            return self._ranks.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(self._control.recv() or "the ranks ended early") from error

    def end(self) -> None:
        """Ends the ranks."""
        self._ranks.close()
        if (failure := self._control.recv()) is not None:
            raise RuntimeError(failure)

    def _called(self) -> Connection:
        """Waits until the side, or its first rank, calls."""
        control = getattr(self, "_control", None)
        while not select.select([self._listener], [], [], 0.05)[0]:
            if control is not None and control.poll():
                raise RuntimeError(control.recv())
            if self._process.poll() is not None:
                raise RuntimeError(self._log.read_text(errors="replace"))
        return Connection(self._listener.accept()[0].detach())


def _num_steps(turn: Turn) -> int:
    return min(_MOST_STEPS, max(2, round(_STRETCH_S / turn.wall_s)))


def main(address: str) -> None:
    """A side."""
    with Client(address, family="AF_UNIX") as control:
        for row, names, at in _rows(control):
            failure = None
            try:
                run_ranks(serve, row.ranks, at, row, names, timeout_s=_LONGEST_S, preload=("transformers",))
            except Exception:
                failure = traceback.format_exc()
            control.send(failure)


def _rows(control: Connection) -> Iterator[Any]:
    with contextlib.suppress(EOFError):
        while True:
            yield control.recv()


if __name__ == "__main__":
    main(*sys.argv[1:])
