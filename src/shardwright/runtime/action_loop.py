"""Runs the action list of a rank: computes, sends, receives, copies to the host and back.

::

    RECV_F 1,0    posts a buffer                    1RECV_F0  1RECV_F1  1F0  1SEND_F0 ...
    F 1,0         stage 1 computes microbatch 0     ───────────────────────────────────▶ time
    SEND_F 1,0    starts sending what it made
    OFFLOAD 1,0   what it keeps starts to leave, where that has not begun in its forward
    LOAD 1,0      what its backward needs first starts to come back
    B 1,0         stage 1 takes in gradients

The loop knows no framework: a front end supplies the rank's stages.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardwright.flight_record import NEXT, Page, code_of, code_of_end, new_ring
from shardwright.runtime.batch_schedules import RankProgram
from shardwright.runtime.homes import Crossing
from shardwright.schedule import Action, Kind, Schedule


class Receipt(Protocol):
    """A receive that was posted."""

    def wait(self) -> Any:
        """Blocks until the tensor has arrived; gives it."""


class Channels(Protocol):
    """Moves a framework's tensors between pipeline ranks, in order from each rank to another."""

    def post_receive(self, crossing: Crossing, source: int) -> Receipt:
        """Announces that the next tensor from a rank can be taken; it looks as the crossing says."""

    def send(self, tensor: Any, crossing: Crossing, target: int) -> None:
        """Starts sending a tensor to a rank."""


class _Sender(Protocol):
    """A stage of this rank, as the messages that leave it see it."""

    def to_send(self, microbatch: int, crossing: Crossing) -> Any:
        """A value that the stage has made."""

    def gradient_to_send(self, microbatch: int, crossing: Crossing) -> Any:
        """The gradient of a value that the stage has read."""


class Messages:
    """Posts receives ahead, waits for them when they are needed, and sends."""

    def __init__(self, channels: Channels, programs: Sequence[RankProgram]):
        self.waited_s = 0.0
        self._channels = channels
        self._programs = programs
        self._inbox: dict[tuple[int, int, int, bool], Receipt] = {}

    def post(self, action: Action) -> None:
        """Posts the receives of one edge; the stage of the action is the one that receives."""
        assert action.peer is not None
        program, is_gradient = self._programs[action.microbatch], action.kind is Kind.RECV_B
        routes = program.gradients if is_gradient else program.crossings
        source = program.stage_ranks[action.peer]
        for crossing in routes.get((action.peer, action.stage), ()):
            key = action.microbatch, crossing.value, crossing.target, is_gradient
            self._inbox[key] = self._channels.post_receive(crossing, source)

    def send(self, action: Action, stage: _Sender) -> None:
        """Sends the values of one edge, or their gradients; the stage is the one of the action."""
        assert action.peer is not None
        program, is_gradient = self._programs[action.microbatch], action.kind is Kind.SEND_B
        routes = program.gradients if is_gradient else program.crossings
        made = stage.gradient_to_send if is_gradient else stage.to_send
        target = program.stage_ranks[action.peer]
        for crossing in routes.get((action.stage, action.peer), ()):
            self._channels.send(made(action.microbatch, crossing), crossing, target)

    def receive(self, microbatch: int, crossing: Crossing, *, is_gradient: bool = False) -> Any:
        """Waits for a value, or for its gradient, whose receive was posted."""
        receipt = self._inbox.pop((microbatch, crossing.value, crossing.target, is_gradient))
        start_s = time.perf_counter()
        tensor = receipt.wait()
        self.waited_s += time.perf_counter() - start_s
        return tensor


class Stage(_Sender, Protocol):
    """One stage of this rank, as a front end computes it.

    It asks `Messages.receive` for what other ranks have made, when it comes to need it.
    """

    def forward(self, microbatch: int) -> None:
        """Computes the stage's outputs for a microbatch."""

    def backward(self, microbatch: int, *, is_last: bool) -> None:
        """Computes the gradients of the stage's inputs and weights."""

    def backward_input(self, microbatch: int) -> None:
        """Computes only the gradients of the stage's inputs."""

    def backward_weight(self, microbatch: int, *, is_last: bool) -> None:
        """Computes the gradients of the weights, after `backward_input`."""

    def offload(self, microbatch: int) -> None:
        """Starts to copy what the forward has kept to the host; comes back at once, or when there is room."""

    def load(self, microbatch: int) -> None:
        """Starts to copy back what the backward needs first; comes back at once."""


@dataclass(slots=True)
class MeasuredRow:
    """The measured times of a rank's actions.

    Attributes:
        events: (action, start, end, time spent waiting for messages), seconds on `time.perf_counter`.
        memory: bytes in use when each of them ended; empty where nobody asked.
        host_copies: (action, start, end) of copies to the host and back, which run beside the others.
    """

    events: list[tuple[Action, float, float, float]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    host_copies: list[tuple[Action, float, float]] = field(default_factory=list)


def run_actions(
    schedule: Schedule,
    rank: int,
    stages: Mapping[int, Stage],
    messages: Messages,
    *,
    other_waits_s: Callable[[], float] = lambda: 0.0,
    bytes_in_use: Callable[[], int] | None = None,
    named: Callable[[Action], AbstractContextManager[object]] | None = None,
) -> MeasuredRow:
    row = MeasuredRow()
    weights_left = dict.fromkeys(stages, schedule.num_microbatches)
    actions = schedule.actions[rank]
    noted, at = _NOTED.cells, _NOTED.at
    for action, code in zip(actions, _codes_of(actions), strict=True):
        _PRESENT[0] = action
        at = NEXT[at]
        start_s = time.perf_counter()
        noted[at], noted[at + 1], noted[at + 2] = code, start_s, 0.0
        context = _NOTHING if named is None else named(action)
        if not action.is_compute:
            with context:
                _move(stages, messages, action)
            continue
        if action.kind is Kind.BACKWARD or action.kind is Kind.BACKWARD_WEIGHT:
            weights_left[action.stage] -= 1
        waited_s = messages.waited_s + other_waits_s()
        with context:
            _compute(stages[action.stage], action, is_last=weights_left[action.stage] == 0)
        noted[at + 2] = end_s = time.perf_counter()
        noted[at + 3] = waited_s = messages.waited_s + other_waits_s() - waited_s
        row.events.append((action, start_s, end_s, waited_s))
        if bytes_in_use is not None:
            row.memory.append(bytes_in_use())
    _PRESENT[0], _NOTED.at = None, at
    return row


class _Noted:
    """Where actions are noted: on the page of this rank, once it has one."""

    __slots__ = ("at", "cells")

    def __init__(self) -> None:
        self.cells, self.at = new_ring(), 0


_NOTED = _Noted()
_KINDS = {kind: number for number, kind in enumerate(Kind)}
_CODES: dict[int, tuple[Sequence[Action], tuple[float, ...]]] = {}
_MOST_SCHEDULES = 64


def note_actions_on(page: Page) -> None:
    """From now on, actions are noted on a page."""
    _NOTED.cells, _NOTED.at = page.cells, 0


def note_end_of_step(step: int) -> None:
    _PRESENT[0] = None
    _note(code_of_end(step))


def note_begin(kind: Kind, microbatch: int | None = None) -> None:
    """A rank that has the whole model, and no list of actions, begins one; None: of the same microbatch."""
    if microbatch is None:
        microbatch = 0 if _PRESENT[0] is None else _PRESENT[0].microbatch
    _PRESENT[0] = Action(kind, 0, microbatch)
    _note(code_of(_KINDS[kind], 0, microbatch))


def _note(code: float) -> None:
    cells, at = _NOTED.cells, NEXT[_NOTED.at]
    cells[at], cells[at + 1], cells[at + 2] = code, time.perf_counter(), 0.0
    _NOTED.at = at


def _codes_of(actions: Sequence[Action]) -> tuple[float, ...]:
    """Worked out once for the row of a schedule: its actions take long to hash."""
    known = _CODES.get(id(actions))
    if known is None or known[0] is not actions:
        if len(_CODES) >= _MOST_SCHEDULES:
            _CODES.clear()
        codes = tuple(code_of(_KINDS[each.kind], each.stage, each.microbatch) for each in actions)
        known = _CODES[id(actions)] = (actions, codes)
    return known[1]


_PRESENT: list[Action | None] = [None]
"""What is computed now; another thread reads it."""


def present_action() -> str:
    """What the rank computes, or sends, at this moment; empty between batches."""
    (action,) = _PRESENT
    if action is None:
        return ""
    return f"{action.kind.name.lower()} of microbatch {action.microbatch} on stage {action.stage}"


_NOTHING = nullcontext()


def _move(stages: Mapping[int, Stage], messages: Messages, action: Action) -> None:
    """Starts a message, or a copy to the host or back."""
    kind = action.kind
    if kind is Kind.RECV_F or kind is Kind.RECV_B:
        messages.post(action)
    elif kind is Kind.SEND_F or kind is Kind.SEND_B:
        messages.send(action, stages[action.stage])
    elif kind is Kind.OFFLOAD:
        stages[action.stage].offload(action.microbatch)
    else:
        stages[action.stage].load(action.microbatch)


def _compute(stage: Stage, action: Action, *, is_last: bool) -> None:
    kind = action.kind
    if kind is Kind.FORWARD:
        stage.forward(action.microbatch)
    elif kind is Kind.BACKWARD:
        stage.backward(action.microbatch, is_last=is_last)
    elif kind is Kind.BACKWARD_INPUT:
        stage.backward_input(action.microbatch)
    else:
        stage.backward_weight(action.microbatch, is_last=is_last)
