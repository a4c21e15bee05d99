"""One microbatch on one rank: runs the user's step function, stage by stage."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from greenlet import GreenletExit
from torch import Tensor, nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatches.known_values import KnownValues
from shardwright.torch.execution.microbatches.microbatch_state import MicrobatchState
from shardwright.torch.execution.microbatches.microbatch_tensors import MicrobatchTensors
from shardwright.torch.execution.microbatches.program_cursor import ProgramCursor
from shardwright.torch.execution.microbatches.program_end import ProgramEnd, TraceComparison
from shardwright.torch.execution.microbatches.stage_turns import (
    MicrobatchGenerators,
    SharedByMicrobatches,
    StageTurns,
    unit_run,
)
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.glue import (
    GlueMode,
    Realised,
    plain_torch,
    set_active_handler,
)
from shardwright.torch.interception.step_code import in_step_code, reads_values
from shardwright.torch.interception.unit_attributes import with_found
from shardwright.torch.offload.stage_offload import StageOffload
from shardwright.torch.program.instructions import Instruction, Place
from shardwright.torch.program.program import (
    Program,
    copied_out,
    given_back,
    leave_stand_ins,
    stand_in,
    with_stand_ins,
)
from shardwright.torch.python_state.shared_state import fill
from shardwright.torch.pytorch.functions import CALLS_UNITS, gradient_of_backward
from shardwright.torch.pytorch.tree import flatten, leaves, map_tree
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole

log = logging.getLogger(__name__)


class Microbatch:
    """The handler of a step function while it runs.

    Attributes:
        uses: id of a weight -> contributions to its gradient that are still to come.
        outside_s: seconds of operations that rest on no unit, such as a teacher outside of the model.
    """

    intercepts = True
    is_trace = False

    def __init__(
        self,
        index: int,
        program: Program,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        batch: SharedByMicrobatches,
    ):
        device = batch.device
        self.index = index
        self.program = program
        self.loss: Tensor | None = None
        self.loss_gradient: Tensor | None = None
        self.tensors = MicrobatchTensors(index, program, batch.receive, batch.buffers)
        self.generators = MicrobatchGenerators(index, device)
        self.state = MicrobatchState(index, program, batch.model, batch.attributes)
        self.uses: dict[int, int] = {}
        self.outside_s = 0.0
        self.offloads: dict[int, StageOffload] = {}
        self._function = batch.function
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = arguments
        self._cursor = cursor = ProgramCursor(index, program, batch.parameters, device)
        self._comparison = TraceComparison(index, program)
        self._turns = turns = StageTurns(
            self._run, cursor, around=self._in_turn, before_pause=lambda: self._known.before_pause()
        )
        self._known = KnownValues(
            index, program, cursor, self.tensors, batch.board, turns.wait_for_others, device
        )
        self._end = ProgramEnd(program, cursor, self.tensors, self._known, turns.enter)
        self._has_end = program.trace.ends
        self._data = None if index else batch.data
        self._given_loss: Tensor | None = None
        self._closing = False

    # ---- driven by the executor ----

    def forward(self, stage: int) -> None:
        """Runs the step function up to work of another stage of this rank, or backward, or the end."""
        self._turns.forward(stage)

    def come_to_backward(self) -> bool:
        """Whether the step function has called ``backward``, or may still do so; goes on if it waits."""
        return self._turns.come_to_backward()

    def finish(self) -> Returned:
        """Runs the code after ``backward``, and returns what the step function returned.

        Lets go of the rest: references in a circle (this object, its coroutine, its function) would keep
        tensors until Python's garbage collector comes by.
        """
        returned = self._returned(self._turns.finish())
        if self.program.boundary is not None:
            whole_loss = _whole(returned.loss)
            returned = replace(returned, result=map_tree(_whole, returned.result), loss=whole_loss)
        self.close()
        return returned

    def _returned(self, result: Any) -> Returned:
        if self.is_behind_end:
            return self._end.returned(result, self._given_loss, trains=self._turns.reached_backward)
        values = self.program.trace.result_values
        loss_at = next((place for place, value in values if value == self.program.trace.graph.loss), None)
        result = self.tensors.in_result(result)
        return Returned(result, values, loss_at, self._turns.reached_backward, loss=self.loss)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Surrounds each turn of the step function."""
        with self._end.refusing_draws(), self.state.swapped_in():
            yield
        if self._turns.reached_backward:
            self.state.backward_reached()

    @contextmanager
    def running_again(self, stage: int) -> Iterator[None]:
        """Gives a forward that a backward of this stage repeats what it got at first."""

        def realise(item: Any) -> Any:
            if not isinstance(item, DeferredTensor):
                return item
            leaf = self.tensors.leaves.get((item.value, stage))
            return self._known.returned(item) if leaf is None else leaf

        with Realised(realise):
            yield

    @property
    def is_behind_end(self) -> bool:
        """Whether the step function has left its program."""
        return self._end.is_passed

    def close(self) -> None:
        """Ends the microbatch, and leaves a step function that has not returned."""
        self._closing = True
        try:
            with self.state.swapped_in_to_leave():
                self._turns.close()
        except Exception:
            # The batch has failed already, for a reason that must not be hidden.
            log.warning(
                "the step function raised while it was left in microbatch %d", self.index, exc_info=True
            )
        for each in (self.state, self._cursor, self.tensors, self._known):
            each.clear()
        self.loss = self.loss_gradient = self._given_loss = None

    # ---- called by the step function ----

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a torch function between units, or gives stand-ins for its result."""
        if self._closing:
            return _while_leaving(func, args, kwargs)
        if func is Tensor.backward:
            return self.backward(args[0], gradient_of_backward(*args[1:], **kwargs))
        if in_step_code():
            result = self._operation_of_step(func, args, kwargs)
            if self._data is not None:
                with plain_torch():
                    self._data.operation(func, args, kwargs, result)
            return result
        return self._execute(self._cursor.operation(func, args, kwargs), func, args, kwargs)

    def _operation_of_step(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Executes an operation of code that may read values, and that its program may end before."""
        # The first question is all that most operations are asked: nothing has ended, or will, as traced.
        if (self._has_end or self.is_behind_end) and self._end.passes():
            return self._end.run(func, args, kwargs, behind_backward=self._turns.reached_backward)
        if reads_values(func) and not self._cursor.rests_on_nothing(args, kwargs):
            args, kwargs = map_tree(self._known.here, (args, kwargs))
            return func(*args, **kwargs)
        try:
            instruction = self._cursor.operation(func, args, kwargs)
        except TraceMismatchError:
            if not self._end.passes(on_path=False):
                raise
            return self._end.run(func, args, kwargs, behind_backward=self._turns.reached_backward)
        return self._execute(instruction, func, args, kwargs)

    def _execute(
        self,
        instruction: Instruction | None,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        position = self._cursor.position
        if instruction is None or instruction.place is Place.FREE:
            begun_s = time.perf_counter()
            if instruction is None:
                result = self._cursor.run_unknown(func, args, kwargs)
            else:
                draws = instruction.step.draws or instruction.step.looks_at_values
                if draws:
                    self.generators.before_step(instruction, position - 1)
                result = func(*args, **kwargs)
                if draws:
                    self.generators.after_step(instruction)
            self.outside_s += time.perf_counter() - begun_s
            return result
        self._check(instruction, args, kwargs)
        if instruction.place is Place.ELSEWHERE:
            return stand_in(instruction.step.result, args, kwargs)
        given = given_back(instruction.step.result, args, kwargs, is_free=self._cursor.is_free)
        args, kwargs, copied = self._begin(instruction, position, args, kwargs)
        boundary = self.program.boundary if instruction.divided else None
        if boundary is not None and boundary.cuts and torch.is_grad_enabled():
            with plain_torch():
                boundary.watch_gradients((args, kwargs))
        with plain_torch() if func in CALLS_UNITS else nullcontext():
            result = func(*args, **kwargs)
        if boundary is not None:
            with plain_torch():
                result = boundary.all_placed(result, keeps_cuts=boundary.cuts, stays=instruction.stays)
        self.generators.after_step(instruction)
        self.tensors.keep(instruction, result, args, kwargs, copied)
        return self._given(instruction, result, given)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit of this rank, or gives stand-ins for its result."""
        if self._closing:
            raise GreenletExit
        self._end.refuse_model(behind_backward=self._turns.reached_backward)
        instruction = self._cursor.unit_call(module)
        position = self._cursor.position
        step, arguments = instruction.step, instruction.attributes.arguments
        if arguments:
            kwargs = with_found(kwargs, arguments)
        own = args, kwargs
        self._check(instruction, args, kwargs)
        if instruction.place is Place.ELSEWHERE:
            leave_stand_ins(step.unit, args, kwargs)
            return fill(stand_in(step.result, args, kwargs), *own)
        given = given_back(step.result, args, kwargs, is_free=self._cursor.is_free)
        with plain_torch():
            args, kwargs, copied = self._begin(instruction, position, args, kwargs)
            if instruction.recompute and not step.flat:
                # Lists may get longer before the backward.
                args, kwargs = map_tree(lambda item: item, (args, kwargs))
            with self._keeping(instruction):
                run = unit_run(instruction, boundary=self.program.boundary, microbatch=self.index)
                result = run(*args, **kwargs)
            self.generators.after_step(instruction)
            if step.unit.own_results:
                result = copied_out(result, step.unit.own_results)
            self.tensors.keep(instruction, result, args, kwargs, copied)
            result = self._given(instruction, result, given)
            for place, (owner, key, _) in enumerate(step.unit.attributes, start=len(step.result.leaves)):
                self._cursor.note_made(vars(owner)[key], (), {0: instruction.values[place]})
            self.state.note_left(instruction.stage, instruction.attributes.left)
            return fill(result, *own)

    def _keeping(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Surrounds the run of a unit: what it keeps for its backward may be offloaded."""
        offload = self.offloads.get(instruction.stage) if instruction.offload else None
        return nullcontext() if offload is None else offload.keeping(instruction.step.func)

    def _given(self, instruction: Instruction, result: Any, given: Mapping[int, Any]) -> Any:
        """The result of a step of this rank, as the step function gets it."""
        result = with_stand_ins(result, given)
        self._cursor.note_made(result, given.values(), instruction.values)
        self._note_seen(result)  # by the step function, if that has called a unit itself
        return result

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Hands the loss to the executor; comes back when this microbatch has no backward left here."""
        if self._closing:
            raise GreenletExit
        self._given_loss = loss
        if in_step_code() and self._end.passes(on_path=self._cursor.is_at_backward):
            taken = self._end.take_loss(loss, gradient, behind_backward=self._turns.reached_backward)
            self.loss, gradient = taken
        else:
            self._take_loss(loss)
        self._known.pass_backward()
        self.loss_gradient = gradient
        self._turns.pause_for_backward()

    def _take_loss(self, loss: Tensor) -> None:
        """Keeps the loss of the program, on the rank that computes it."""
        self._cursor.backward()
        self._comparison.loss(loss)
        if self.program.loss_stage in self.program.stages:
            value = self.program.trace.graph.loss
            assert value is not None
            self.loss = self.tensors.values[value]

    def model_begins(self) -> None:
        """Refuses a call of the model behind the end of the program."""
        self._end.refuse_model(behind_backward=self._turns.reached_backward)

    def model_returned(self, result: Any) -> None:
        """Records what the step function gets to see; leaves it here where it will have to wait.

        Not in the middle of what follows: ``total += loss.item()`` would add to a total of before, if another
        microbatch came in between.
        """
        self._note_seen(result)
        if not self._has_end or not in_step_code():
            return
        waits = any(isinstance(item, DeferredTensor) for item in leaves(result))
        if waits and not self._cursor.has_work():
            self._turns.wait_for_others()

    def set_next_generators(self) -> None:
        """Gives the generators the state from which the next step of this rank draws, if one does."""
        self.generators.set_for_next(self._cursor.position)

    # ---- inside ----

    def _run(self) -> Any:
        assert self._arguments is not None
        args, kwargs = self._arguments
        self._arguments = None
        set_active_handler(self)
        try:
            with GlueMode(self):
                result = self._function(*args, **kwargs)
        except Exception as error:
            # Other ranks need values to come to the same error, which is the one that counts.
            try:
                self._known.pass_backward()
            except Exception as another:
                error.add_note(f"Nor could other ranks be told: {type(another).__name__}: {another}")
            raise
        is_behind_end = self._end.passes(on_path=self._cursor.is_through)
        self._known.pass_backward()
        if not is_behind_end:
            self._cursor.end()
            self._comparison.result(result)
        return result

    def _check(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares a call with the trace, and records what it will change."""
        if instruction.expects:
            self._comparison.arguments(instruction, args, kwargs)
        if instruction.spoils:
            self._cursor.note_spoilt(instruction, args, kwargs)
        if instruction.changes:
            self._known.before_change(instruction.changes)

    def _note_seen(self, result: Any) -> None:
        """Records what code of the step function gets to see."""
        # Where nothing was read in the trace, what is read nevertheless is put up then.
        if self._has_end and in_step_code():
            self._known.note(result)

    def _begin(
        self, instruction: Instruction, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
        """Waits for the stage of a step; gives what `MicrobatchTensors.find` does."""
        self._turns.enter(instruction.stage)
        copied: dict[int, Tensor] = {}
        if instruction.flow.finds:
            args, kwargs, copied = self.tensors.find(instruction, args, kwargs)
        self.generators.before_step(instruction, position - 1)
        return args, kwargs, copied


def _whole(item: Any) -> Any:
    return whole(item) if item.__class__ is DividedTensor else item


def _while_leaving(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation of a `finally` block while a step function is left; ends it if data is missing."""
    if any(isinstance(item, DeferredTensor) for item in flatten((args, kwargs))[0]):
        raise GreenletExit
    return func(*args, **kwargs)
