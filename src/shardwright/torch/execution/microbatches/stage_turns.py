"""Whose turn it is within a microbatch, and the runs of its units."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.comm.joining.store import ValueBoard
from shardwright.errors import TraceMismatchError
from shardwright.runtime.homes import Crossing
from shardwright.torch.backward.activation_checkpointing import call_recomputed
from shardwright.torch.backward.batch_data import BatchData
from shardwright.torch.execution.microbatches.microbatch_state import OwnAttributes, called_as_now
from shardwright.torch.execution.microbatches.program_cursor import ProgramCursor
from shardwright.torch.interception.coroutine import Coroutine
from shardwright.torch.interception.glue import call_without_hooks
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.program.program_checks import refusing_changes
from shardwright.torch.python_state.shared_state import returning_contents
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.randomness import GeneratorState, Turn, get_state, same_state, set_state
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tracing.together import GlueBuffers
from shardwright.torch.tracing.trace_data import Step


def unit_run(instruction: Instruction, *, boundary: Boundary | None, microbatch: int) -> Callable[..., Any]:
    unit, allowed = instruction.step.func, instruction.flow.may_change
    call: Callable[..., Any] = partial(call_without_hooks, unit)
    if not instruction.step.flat:
        refuse = partial(refuse_other_contents, instruction.step, microbatch=microbatch)
        call = returning_contents(call, instruction.step.unit.fills, refuse)
    if instruction.divided and boundary is not None:
        left = [(module, key) for module, key, _ in instruction.step.unit.attributes]
        call = boundary.around(unit, call, attributes=left, stays=instruction.stays)
    if allowed is not None:
        call = refusing_changes(call, unit, allowed, line=instruction.step.line, microbatch=microbatch)
    if instruction.recompute:
        call = called_as_now(call, instruction.attributes.set_before)
        call = partial(_recomputed, unit, call)
    return call


def _recomputed(unit: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call_recomputed(unit, call, args, kwargs)


def refuse_other_contents(step: Step, *, microbatch: int) -> NoReturn:
    """Refuses the call of a unit that leaves other entries in containers than other ranks find in theirs."""
    raise TraceMismatchError(
        f"{step.call} leaves other entries in a list or a dictionary among its arguments in microbatch "
        f"{microbatch} than in the trace, by which other ranks go. Give it a new container in every "
        "microbatch, or return what it has made."
    )


class MicrobatchGenerators:
    """Gives each step of a microbatch the generators as a plain loop would have them there."""

    def __init__(self, index: int, device: torch.device):
        self._index = index
        self._device = device
        self._turns: Mapping[int, Turn] = {}
        self._own: tuple[torch.Generator, ...] = ()
        # What the step that is running must leave; None where nobody has to know.
        self._must_leave: GeneratorState | None = None

    def run_ahead(self, turns: Mapping[int, Turn], own: tuple[torch.Generator, ...]) -> None:
        self._turns, self._own = turns, own

    def set_for_next(self, position: int) -> None:
        """Gives the generators the state from which the next step of this rank draws, if one does."""
        coming = [later for later in self._turns if later >= position]
        if coming:
            set_state(self._turns[min(coming)].before, self._device, self._own)

    def before_step(self, instruction: Instruction, position: int) -> None:
        """Makes random numbers those that a plain loop would draw in this step."""
        self._must_leave = None
        turn = self._turns.get(position) if instruction.step.draws else None
        if turn is not None:
            set_state(turn.before, self._device, self._own)
            self._must_leave = turn.after
        elif instruction.step.looks_at_values:
            self._must_leave = get_state(self._device, self._own)

    def after_step(self, instruction: Instruction) -> None:
        """Refuses a step that has drawn more or less than was run ahead for all other steps."""
        if self._must_leave is None:
            return
        if same_state(self._must_leave, get_state(self._device, self._own)):
            return
        step = instruction.step
        raise TraceMismatchError(
            f"{step.line or user_line()}: {name_of_call(step.func)} takes another amount of "
            f"random numbers in microbatch {self._index} than in the trace, so other stages would draw other "
            "numbers than in a single process. How many it takes must not follow from values or from other "
            "random numbers. Draw always, and choose with torch.where or a mask; numbers whose drawing looks "
            "at values (RReLU, Poisson, binomial, Gamma, Beta, Dirichlet) can be drawn before the step "
            "function and passed to it. What a layer filters by values (self-loops of a graph) can be "
            "filtered before it, too. Code that the script compiles draws as Python wrote it with "
            'torch.compile(model, options={"fallback_random": True}).'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedByMicrobatches:
    """What the microbatches of a batch have in common on a rank.

    Attributes:
        receive: waits for a value of another rank; gets the index of the microbatch.
        board: where ranks put up values that the step function reads.
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
