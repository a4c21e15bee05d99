"""Has faults happen in a rank: the points of a run at which they may, and what has happened before.

::

    sw.init ── init          run_step ── start      _compute ── forward, backward     close ── end
                             NewFile.write ── save  UpdateClock.run ── update

`sw.init` calls `install` where ``SHARDWRIGHT_CHAOS`` is set. Only the points that a rank needs are watched,
by another function in the place of the library's own: a run without faults runs none of this.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from shardwright.after_import import after_import
from shardwright.run.context import context, is_initialized
from shardwright.schedule import Action, Kind
from shardwright.testing.faults import CHAOS, RANDOM_PHASES, Fault, Faults, Phase, RandomFaults, happen

__all__ = ["NOTES", "RankFaults", "happened", "install"]

NOTES = "faults.jsonl"
"""A line for each fault that has happened."""


def install(rank: int, world_size: int) -> None:
    """Has the faults of this rank happen from now on; at the beginning of ``sw.init``."""
    path = Path(os.environ[CHAOS])
    faults = Faults.read(path)
    folder = Path(os.environ.get("SHARDWRIGHT_RUN_DIR") or path.parent)
    if not happened(folder / NOTES):  # afterwards, hosts may have gone with their ranks
        faults.check(world_size)
    rank_faults = RankFaults(faults, rank, world_size, folder / NOTES)
    rank_faults.at("init")
    _watch(rank_faults)


def happened(notes: Path) -> list[dict[str, Any]]:
    """What has happened so far, in its order: fault, kind, rank, phase, step, at_s (as `time.time`), life."""
    if not notes.is_file():
        return []
    return [json.loads(line) for line in notes.read_text().splitlines()]


class RankFaults:
    """The faults of a rank that have not happened yet."""

    def __init__(self, faults: Faults, rank: int, world_size: int, notes: Path):
        self._rank = rank
        self._notes = notes
        self._life = f"{os.environ.get('MASTER_PORT')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        before = {note["fault"] for note in happened(notes)}
        self._waiting = {
            f"{number}": fault
            for number, fault in enumerate(faults.faults)
            if fault.rank == rank and (fault.again or f"{number}" not in before)
        }
        self._slow: list[Fault] = []
        self._random: _Drawn | None = None
        drawn: tuple[Phase, ...] = ()
        if faults.random is not None:
            first = max((int(name[1:]) + 1 for name in before if name.startswith("r")), default=0)
            self._random = _Drawn(faults.random, world_size, first=first)
            drawn = RANDOM_PHASES
        self.phases = {*drawn, *(fault.phase for fault in self._waiting.values())}

    def at(self, phase: Phase, step: int | None = None) -> None:
        """The rank is at a point: what is due happens."""
        for fault in self.due(phase, step):
            happen(fault.kind, fault.seconds)
        if phase == "end":
            for fault in self._waiting.values():  # a test that nothing has disturbed would prove little
                text = fault.model_dump_json(exclude_defaults=True)
                sys.stderr.write(f"shardwright: this fault has not happened: {text}\n")

    def due(self, phase: Phase, step: int | None = None) -> Iterator[Fault]:
        """What is to happen now; it is noted before."""
        yield from [fault for fault in self._slow if fault.phase == phase]
        for name, fault in list(self._waiting.items()):
            if fault.phase == phase and (fault.step or 0) <= (step or 0):
                del self._waiting[name]
                self._note(name, fault, step)
                if fault.kind == "slow":
                    self._slow.append(fault)
                yield fault
        if self._random is not None:
            for name, fault in self._random.due(phase, self._rank):
                if not any(note["life"] == self._life and _ends(note) for note in happened(self._notes)):
                    self._note(name, fault, step)
                    yield fault

    def _note(self, name: str, fault: Fault, step: int | None) -> None:
        said = {"fault": name, "kind": fault.kind, "rank": self._rank, "phase": fault.phase, "step": step}
        line = json.dumps({**said, "at_s": time.time(), "life": self._life}) + "\n"
        with self._notes.open("ab", buffering=0) as file:
            file.write(line.encode())


def _ends(note: dict[str, Any]) -> bool:
    return note["kind"] not in ("pause", "slow")


class _Drawn:
    """The random faults of all ranks, whose time each rank knows."""

    def __init__(self, drawn: RandomFaults, world_size: int, *, first: int):
        self._drawn = drawn
        self._world_size = world_size
        self._next = first
        self._due_s: float | None = None

    def due(self, phase: Phase, rank: int) -> Iterator[tuple[str, Fault]]:
        """Those that are to happen to this rank now."""
        now_s = time.monotonic()
        if phase not in ("init", "end") and self._due_s is None:
            self._due_s = now_s + self._of_next()[1]
        if self._due_s is None:
            return
        most = float("inf") if self._drawn.most is None else self._drawn.most
        while now_s >= self._due_s and self._next < most:
            fault = self._of_next()[0]
            if fault.rank == rank and fault.phase != phase:
                return  # at the next point of its phase
            name = f"r{self._next}"
            self._next += 1
            self._due_s += self._of_next()[1]
            if fault.rank == rank:
                yield name, fault

    def _of_next(self) -> tuple[Fault, float]:
        return self._drawn.drawn(self._next, self._world_size)


# ---- the points ----

_Point = Callable[..., tuple[Phase, int | None] | None]
"""The phase and step that a call begins, by its arguments; None: none."""


def _watch(faults: RankFaults) -> None:
    """Puts other functions in the place of those with which the phases of these faults begin."""

    def at(owner: Any, name: str, point: _Point) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if (found := point(*args)) is not None:
                faults.at(*found)
            return original(*args, **kwargs)

        setattr(owner, name, call)

    if faults.phases & {"forward", "backward"}:
        after_import("shardwright.runtime.action_loop", lambda it: at(it, "_compute", _of_action))
        # A rank with the whole model has no actions.
        engine = "shardwright.torch.execution.single_engine"
        after_import(engine, lambda it: at(it.SingleEngine, "_run_microbatch", _in_step("forward")))
        after_import(engine, lambda it: at(it.PlainMicrobatch, "backward", _in_step("backward")))
    if "update" in faults.phases:
        optimizer = "shardwright.torch.optimizer.distributed_optimizer"
        after_import(optimizer, lambda it: at(it.UpdateClock, "run", lambda *_: ("update", _steps_done())))
    if "start" in faults.phases:
        steps = "shardwright.torch.model.steps"
        after_import(steps, lambda it: at(it.Steps, "run", lambda *_: ("start", None)))
    if "save" in faults.phases:
        disk = "shardwright.checkpoint.disk"
        after_import(disk, lambda it: at(it.NewFile, "write", lambda *_: ("save", _steps_done())))
    after_import("shardwright.run.reporting", lambda it: at(it.Reporter, "close", lambda *_: ("end", None)))


def _steps_done() -> int:
    reporter = context().reporter if is_initialized() else None
    return 0 if reporter is None else reporter.num_steps


def _in_step(phase: Phase) -> _Point:
    return lambda *_: (phase, _steps_done() + 1)


def _of_action(stage: Any, action: Action) -> tuple[Phase, int | None]:
    return ("forward" if action.kind is Kind.FORWARD else "backward"), _steps_done() + 1
