"""Whose turn it is within a microbatch, and what microbatches share."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.joining.store import ValueBoard
from shardwright.errors import TraceMismatchError
from shardwright.runtime.crossings import Crossing
from shardwright.torch.backward.batch_data import BatchData
from shardwright.torch.execution.microbatches.microbatch_state import OwnAttributes
from shardwright.torch.execution.microbatches.program_cursor import ProgramCursor
from shardwright.torch.interception.coroutine import Coroutine
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.tracing.together import GlueBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedByMicrobatches:
    """What the microbatches of a batch have in common on a rank.

    Attributes:
        function: the step function.
        receive: waits for a value of another rank; gets the index of the microbatch.
        board: where ranks put up values that the step function reads.
        device: where this rank computes.
        model: the whole model.
        parameters: gives the ids of its parameters.
        buffers: those that microbatches change, one after the other; None without any.
        attributes: those that microbatches change; None without any.
        data: follows what the first one computes; None where nobody looks.
    """

    function: Callable[..., Any]
    receive: Callable[[int, Crossing], Tensor]
    board: ValueBoard
    device: torch.device
    model: nn.Module
    parameters: Callable[[], Collection[int]]
    buffers: GlueBuffers | None
    attributes: OwnAttributes | None
    data: BatchData | None = None


class StageTurns:
    """The turns of one step function.

    Attributes:
        stage: the stage being run; -1 before the start.
        reached_backward: the step function has called ``backward``.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        cursor: ProgramCursor,
        *,
        around: Callable[[], AbstractContextManager[None]],
        before_pause: Callable[[], None],
    ):
        self.stage = -1
        self.reached_backward = False
        self._cursor = cursor
        self._around = around
        self._before_pause = before_pause
        self._coroutine = Coroutine(run)
        # The next stage of this rank that has work; None before the start.
        self._next_stage: int | None = None
        # Whether it waits for other ranks now, and whether it may block this one.
        self._waits = self._may_block = False

    # ---- called by the executor ----

    def forward(self, stage: int) -> None:
        """Runs the step function up to work of another stage of this rank, or backward, or the end.

        One that waits for other ranks goes on if the stage has work in it.
        """
        self._may_block = False
        if self._coroutine.finished or self.reached_backward:
            return
        if self._waits:
            self.stage = stage
            if self._cursor.has_work(stage):
                self._resume()
        elif self._next_stage in (None, stage):  # else the stage has nothing to compute
            self.stage = stage
            self._resume()

    def come_to_backward(self) -> bool:
        """Whether the step function has called ``backward``, or may still do so; goes on if it waits."""
        self._may_block = True
        if self._waits:
            self._resume()
        return self.reached_backward or not self._coroutine.finished

    def finish(self) -> Any:
        """Runs the code after ``backward``; returns what the step function returned."""
        self._may_block = True
        if not self._coroutine.finished:
            self._resume()
        return self._coroutine.result

    def close(self) -> None:
        """Leaves a step function that has not returned; lets go of it."""
        try:
            self._coroutine.close()
        finally:
            self._coroutine = _ENDED

    def _resume(self) -> None:
        with self._around():
            self._coroutine.resume()

    # ---- called inside the step function ----

    def enter(self, stage: int) -> None:
        """Pauses until the executor runs this stage."""
        if stage == self.stage:
            return
        self._next_stage = stage
        while self.stage != stage:
            self._pause()

    def wait_for_others(self, home: int | None = None) -> None:
        """Leaves the step function until this rank has nothing else to do.

        Not where its stage has work left, for which other ranks wait: a value of an earlier stage was made
        before that.
        """
        while not self._may_block:
            if self._cursor.has_work(self.stage):
                if home is not None and home > self.stage:
                    raise TraceMismatchError(
                        f"{user_line()}: the step function reads a value here that it did not read when it "
                        "was traced, of a later stage than the one that computes what follows. Compute all "
                        "that the loss is made of first, and read values then."
                    )
                break
            self._waits = True
            self._pause()
        self._waits = False

    def pause_for_backward(self) -> None:
        """Leaves the step function until this microbatch has no backward left on this rank."""
        self.reached_backward = True
        self._coroutine.pause()

    def _pause(self) -> None:
        self._before_pause()
        self._coroutine.pause()


_ENDED = Coroutine(lambda: None)
