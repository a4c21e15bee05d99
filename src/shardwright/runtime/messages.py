"""The messages of one batch between this rank and the others of its pipeline."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from shardwright.runtime.batch_schedules import RankProgram
from shardwright.runtime.crossings import Crossing
from shardwright.schedule import Action, Kind


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


class Sender(Protocol):
    """A stage of this rank, as the messages that leave it see it."""

    def to_send(self, microbatch: int, crossing: Crossing) -> Any:
        """A value that the stage has made."""

    def gradient_to_send(self, microbatch: int, crossing: Crossing) -> Any:
        """The gradient of a value that the stage has read."""


class Messages:
    """Posts receives ahead, waits for them when they are needed, and sends.

    Attributes:
        waited_s: seconds spent waiting for messages.
    """

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

    def send(self, action: Action, stage: Sender) -> None:
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
