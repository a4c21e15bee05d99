"""Two steps of every run, with the times of all actions: what its report draws below the prediction.

::

    steps      1  2  3  4  5  6 ... 90 ... 104 ... 119    each of these is gathered, and replaces another
    kept             3                             last   in steps.json

The first three steps are gathered, and the last of all where the run knows how many it makes. Of the others,
the first rank asks for one now and then, and says so to all ranks at the end of the step before: nobody
knows the last step of a run before it is over. So a run that is killed leaves two steps, too.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field

from shardwright.errors import UsageError
from shardwright.files import Record, UserFile
from shardwright.observe.metrics import FOREIGN
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.timeline import MeasuredEvent, aligned
from shardwright.quantities import MOST_RANKS
from shardwright.schedule import Action, Kind

_EARLY = 3
"""The first step that does nothing but train: the one before still sizes what the first one began."""

_PAUSE_S = 3.0
"""Between two steps that are asked for: gathering one takes some milliseconds, more on a busy machine."""

_MOST_BYTES = 2**28
_KINDS = {kind.value: kind for kind in Kind}


class ChosenSteps:
    """Chooses the steps that are gathered, alike on all ranks."""

    def __init__(self, total: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._first: int | None = None
        self._last = 0
        self._last_s = 0.0
        self._asked: int | None = None

    def wants(self, number: int) -> bool:
        """Whether a step is gathered: the same on all ranks."""
        early = self._first is None or number - self._first < _EARLY
        return early or number in (self._total, self._asked)

    def done(self, number: int) -> None:
        """A step is over, gathered or not. A run that resumes counts from its first step."""
        if self.wants(number):
            self._last, self._last_s = number, self._clock()
        self._first = number if self._first is None else self._first

    def asks_after(self, number: int) -> bool:
        """Whether the first rank asks for the next step: a tenth and some seconds after the last one."""
        done = self._last - (self._first or 0) + 1
        is_far = number + 1 - self._last >= max(1, done // 10)
        return is_far and self._clock() - self._last_s >= _PAUSE_S

    def asked_after(self, number: int, asked: bool) -> None:
        """What the first rank has asked for, as all ranks were told at the end of a step."""
        self._asked = number + 1 if asked else None


class RankMemoryAfter(NamedTuple):
    """The memory of one rank when a step had ended, before anything else came.

    Attributes:
        state_bytes: of its parameters, their gradients and what optimizers keep, counted tensor by tensor.
        in_use_bytes: all that was in use then, asked as at the ends of actions; 0: nobody knows.
    """

    state_bytes: int = 0
    in_use_bytes: int = 0

    @property
    def other_bytes(self) -> int | None:
        """What was in use beside the training: the interpreter, libraries, data; None if not known."""
        return max(0, self.in_use_bytes - self.state_bytes) if self.in_use_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step with the times of all its actions.

    Attributes:
        seconds: that it took, with what comes before and after the schedule.
        events: the actions and copies of all pipeline ranks; the first work begins at 0.
        memory: of each pipeline rank; empty where nobody looked.
    """

    step: int
    seconds: float
    events: tuple[MeasuredEvent, ...]
    memory: tuple[RankMemoryAfter, ...] = ()

    @classmethod
    def of(
        cls,
        step: int,
        seconds: float,
        events: Iterable[MeasuredEvent],
        memory: Sequence[RankMemoryAfter] = (),
    ) -> "RecordedStep":
        """A step on whatever clock; what was waited before the first work is left out."""
        ordered = sorted(aligned(events), key=lambda event: (event.rank, event.start_s, event.end_s))
        return cls(step=step, seconds=seconds, events=tuple(ordered), memory=tuple(memory))


class StepsFile:
    """Keeps two steps in ``steps.json``: an early one and the last."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._first: int | None = None
        self._early: RecordedStep | None = None

    def add(self, step: RecordedStep) -> None:
        """Writes the file with this step as the last one."""
        if self._first is None:
            self._first = step.step
        is_early = step.step - self._first < _EARLY
        if is_early:
            self._early = step
        kept = [self._early, *(() if is_early else (step,))]
        document = {"version": 1, "steps": [_document(each) for each in kept if each is not None]}
        self._folder.write(self._folder.steps_file.name, json.dumps(document, separators=(",", ":")) + "\n")


class _Rank(Record):
    state_bytes: int = Field(0, ge=0)
    in_use_bytes: int = Field(0, ge=0)
    actions: list[tuple[str, float, float, float, int]] = Field(default_factory=list)


class _Step(Record):
    step: int
    seconds: float = Field(allow_inf_nan=False)
    ranks: list[_Rank] = Field(max_length=MOST_RANKS)


class _Steps(Record):
    version: Literal[1]
    steps: list[_Step] = Field(default_factory=list)


def read_recorded_steps(folder: RunFolder) -> tuple[RecordedStep, ...]:
    """The steps that a run has recorded, in order; none where the file is not there."""
    path = folder.steps_file
    if not path.exists():
        return ()
    file = UserFile(path, what="", error=UsageError, advice=FOREIGN.removesuffix("."), most_bytes=_MOST_BYTES)
    document = file.model(_Steps, file.read_json())
    return tuple(_read_step(step, file) for step in document.steps)


def _document(step: RecordedStep) -> dict[str, Any]:
    """Times are microseconds from the first work."""
    num_ranks = max([len(step.memory), *(event.rank + 1 for event in step.events)])
    rows: list[list[list[Any]]] = [[] for _ in range(num_ranks)]
    for event in step.events:
        times = [round(s * 1e6, 1) for s in (event.start_s, event.end_s, event.waited_s)]
        rows[event.rank].append([str(event.action), *times, event.bytes_in_use])
    ranks = []
    for rank, row in enumerate(rows):
        after = step.memory[rank] if rank < len(step.memory) else RankMemoryAfter()
        ranks.append({**after._asdict(), "actions": row})
    return {"step": step.step, "seconds": step.seconds, "ranks": ranks}


_ROUNDING_US = 1.0  # each of the three numbers is rounded to a tenth


def _read_step(step: _Step, file: UserFile) -> RecordedStep:
    events = []
    for number, rank in enumerate(step.ranks):
        for name, start_us, end_us, waited_us, in_use in rank.actions:
            action = _action(name)
            in_order = 0 <= start_us <= end_us < float("inf")
            if action is None or not in_order or not 0 <= waited_us <= end_us - start_us + _ROUNDING_US:
                raise UsageError(
                    f"{file}: step {step.step}, rank {number} has the action "
                    f"{[name, start_us, end_us, waited_us]}, but it must be a name such as 0F3, with start, "
                    f"end and waiting in microseconds. {FOREIGN}"
                )
            times = (start_us / 1e6, end_us / 1e6, waited_us / 1e6)
            events.append(MeasuredEvent(number, action, *times, in_use))
    memory = tuple(RankMemoryAfter(rank.state_bytes, rank.in_use_bytes) for rank in step.ranks)
    known = memory if any(each.in_use_bytes for each in memory) else ()
    return RecordedStep(step=step.step, seconds=step.seconds, events=tuple(events), memory=known)


def _action(name: str) -> Action | None:
    """The action of a name such as ``0F3``; None where it is none."""
    digits = name.lstrip("0123456789")
    stage, kind = name[: len(name) - len(digits)], digits.rstrip("0123456789")
    microbatch = digits[len(kind) :]
    if not (stage and microbatch) or kind not in _KINDS or len(name) > 40 or not name.isascii():
        return None
    return Action(_KINDS[kind], int(stage), int(microbatch))
