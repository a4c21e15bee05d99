"""What a microbatch of a rank has and runs, whether its calls come from the script or from a list."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.joining.store import ValueBoard
from shardwright.errors import TraceMismatchError
from shardwright.runtime.homes import Crossing
from shardwright.torch.backward.activation_checkpointing import call_recomputed
from shardwright.torch.backward.batch_data import BatchData
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatches.microbatch_state import OwnAttributes, called_as_now
from shardwright.torch.execution.microbatches.microbatch_tensors import (
    MicrobatchTensors,
    refuse_other_contents,
)
from shardwright.torch.interception.glue import call_without_hooks
from shardwright.torch.offload.stage_offload import StageOffload
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.program.program import Program
from shardwright.torch.program.program_checks import refusing_changes
from shardwright.torch.python_state.shared_state import returning_contents
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.randomness import GeneratorState, Turn, get_state, same_state, set_state
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.divide import all_elements
from shardwright.torch.tracing.together import GlueBuffers

NOTHING = nullcontext()


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


def operation_run(
    func: Callable[..., Any], instruction: Instruction, boundary: Boundary | None
) -> Callable[..., Any]:
    if boundary is None or not instruction.divided:
        return func

    def run(*args: Any, **kwargs: Any) -> Any:
        if boundary.cuts and torch.is_grad_enabled():
            boundary.watch_gradients((args, kwargs))
        result = func(*args, **kwargs)
        return boundary.all_placed(result, keeps_cuts=boundary.cuts, stays=instruction.stays)

    return run


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


class RankMicrobatch:
    """What the executor, and the stages of a rank, find in a microbatch.

    Attributes:
        loss: what ``backward`` is given, on the rank that computes it.
        uses: id of a weight -> contributions to its gradient that are still to come.
        outside_s: seconds of operations that rest on no unit, such as a teacher outside of the model.
    """

    def __init__(self, index: int, program: Program, batch: SharedByMicrobatches):
        self.index = index
        self.program = program
        self.loss: Tensor | None = None
        self.loss_gradient: Tensor | None = None
        self.tensors = MicrobatchTensors(index, program, batch.receive, batch.buffers)
        self.generators = MicrobatchGenerators(index, batch.device)
        self.uses: dict[int, int] = {}
        self.outside_s = 0.0
        self.offloads: dict[int, StageOffload] = {}

    def running_again(self, stage: int) -> AbstractContextManager[None]:
        """Gives a forward that a backward of this stage repeats what it got at first."""
        return NOTHING

    def keeping(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Surrounds the run of a unit: what it keeps for its backward may be offloaded."""
        offload = self.offloads.get(instruction.stage) if instruction.offload else None
        return NOTHING if offload is None else offload.keeping(instruction.step.func)

    def take_loss(self) -> None:
        """Keeps the loss of the program, on the rank that computes it."""
        value = self.program.trace.graph.loss
        if value is not None and self.program.loss_stage in self.program.stages:
            self.loss = self.tensors.values[value]

    def returned(self, result: Any, *, trains: bool) -> Returned:
        """What the step function has returned within its program."""
        trace = self.program.trace
        loss_at = next((place for place, value in trace.result_values if value == trace.graph.loss), None)
        result = self.tensors.in_result(result)
        return Returned(result, trace.result_values, loss_at, trains, loss=self.loss)

    def finished(self, returned: Returned) -> Returned:
        """The same with whole tensors, of which ranks may share some; lets go of the rest."""
        if self.program.boundary is not None:
            result, loss = all_elements(returned.result), all_elements(returned.loss)
            returned = replace(returned, result=result, loss=loss)
        self.close()
        return returned

    def close(self) -> None:
        """Ends the microbatch, whether it has ended or not."""
        self.tensors.clear()
        self.loss = self.loss_gradient = None
