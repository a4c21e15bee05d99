"""Runs the action list of a rank: computes, sends, receives.

::

    RECV_F 1,0    posts a buffer                    1RECV_F0  1RECV_F1  1F0  1SEND_F0 ...
    F 1,0         stage 1 computes microbatch 0     ───────────────────────────────────▶ time
    SEND_F 1,0    starts sending what it made
    B 1,0         stage 1 takes in gradients

The loop knows no framework: a front end supplies the rank's stages.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shardwright.errors import ScheduleError
from shardwright.runtime.messages import Messages, Sender
from shardwright.schedule import Action, Kind, Schedule

__all__ = ["MeasuredRow", "Stage", "check_runnable", "run_actions"]


class Stage(Sender, Protocol):
    """One stage of this rank, as a front end computes it.

    It asks `Messages.receive` for what other ranks have made, when it comes to need it.
    """

    def forward(self, microbatch: int) -> None:
        """Computes the stage's outputs for a microbatch."""

    def backward(self, microbatch: int, *, is_last: bool) -> None:
        """Computes the gradients of the stage's inputs and weights.

        Args:
            microbatch: which one.
            is_last: no other backward of the batch adds to the gradients of these weights.
        """

    def backward_input(self, microbatch: int) -> None:
        """Computes only the gradients of the stage's inputs."""

    def backward_weight(self, microbatch: int, *, is_last: bool) -> None:
        """Computes the gradients of the weights, after `backward_input`."""


@dataclass(slots=True)
class MeasuredRow:
    """The measured times of a rank's actions.

    Attributes:
        events: (action, start, end, time spent waiting for messages), seconds on `time.perf_counter`.
        memory: bytes in use when each of them ended; empty where nobody asked.
    """

    events: list[tuple[Action, float, float, float]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def check_runnable(schedule: Schedule) -> None:
    """Refuses a schedule that asks for more than the loop can do.

    Raises:
        ScheduleError: it copies activations to the host.
    """
    if schedule.has_host_copies:
        found = next(a for row in schedule.actions for a in row if a.kind in (Kind.OFFLOAD, Kind.LOAD))
        raise ScheduleError(
            f"schedule {schedule.kind!r} has {found}, a copy to or from the memory of the host, which is "
            "simulated, but not run in this version. Recompute activations instead "
            "(activation_checkpointing), or leave OFFLOAD and LOAD out."
        )


def run_actions(
    schedule: Schedule,
    rank: int,
    stages: Mapping[int, Stage],
    messages: Messages,
    *,
    other_waits_s: Callable[[], float] = lambda: 0.0,
    bytes_in_use: Callable[[], int] | None = None,
) -> MeasuredRow:
    """Runs all actions of one rank.

    Args:
        schedule: lowered actions of all ranks.
        rank: this pipeline rank.
        stages: those of this rank, by number.
        messages: of this batch, which the stages receive from.
        other_waits_s: seconds for which stages have waited for other ranks, messages left out.
        bytes_in_use: memory in use now; asked when an action has ended.
    """
    row = MeasuredRow()
    weights_left = dict.fromkeys(stages, schedule.num_microbatches)
    for action in schedule.actions[rank]:
        kind = action.kind
        if kind is Kind.RECV_F or kind is Kind.RECV_B:
            messages.post(action)
            continue
        if kind is Kind.SEND_F or kind is Kind.SEND_B:
            messages.send(action, stages[action.stage])
            continue
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHT:
            weights_left[action.stage] -= 1
        waited_s = messages.waited_s + other_waits_s()
        start_s = time.perf_counter()
        _compute(stages[action.stage], action, is_last=weights_left[action.stage] == 0)
        end_s = time.perf_counter()
        row.events.append((action, start_s, end_s, messages.waited_s + other_waits_s() - waited_s))
        if bytes_in_use is not None:
            row.memory.append(bytes_in_use())
    return row


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
