"""One microbatch on one rank: runs the user's step function, stage by stage."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from greenlet import GreenletExit
from torch import Tensor, nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatches.cursor import Cursor
from shardwright.torch.execution.microbatches.microbatch_state import MicrobatchState
from shardwright.torch.execution.microbatches.program_end import ProgramEnd
from shardwright.torch.execution.microbatches.rank_microbatch import (
    NOTHING,
    RankMicrobatch,
    SharedByMicrobatches,
    operation_run,
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

log = logging.getLogger(__name__)


class Microbatch(RankMicrobatch):
    """The handler of a step function while it runs."""

    intercepts = True
    is_trace = False

    def __init__(
        self,
        index: int,
        program: Program,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        batch: SharedByMicrobatches,
    ):
        super().__init__(index, program, batch)
        self.state = MicrobatchState(index, program, batch.model, batch.attributes)
        self._function = batch.function
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = arguments
        self._cursor = cursor = Cursor(
            index,
            program,
            batch.parameters,
            batch.device,
            self._run,
            around=self._in_turn,
            before_pause=lambda: self._end.before_pause(),
        )
        self._end = ProgramEnd(index, program, cursor, self.tensors, batch.board, batch.device)
        self._has_end = program.trace.ends
        self._data = None if index else batch.data
        self._given_loss: Tensor | None = None
        self._closing = False

    # ---- driven by the executor ----

    def forward(self, stage: int) -> None:
        """Runs the step function up to work of another stage of this rank, or backward, or the end."""
        self._cursor.forward(stage)

    def come_to_backward(self) -> bool:
        """Whether the step function has called ``backward``, or may still do so; goes on if it waits."""
        return self._cursor.come_to_backward()

    def finish(self) -> Returned:
        """Runs the code after ``backward``, and returns what the step function returned.

        Lets go of the rest: references in a circle (this object, its coroutine, its function) would keep
        tensors until Python's garbage collector comes by.
        """
        result, cursor = self._cursor.finish(), self._cursor
        if cursor.behind_end:
            return self.finished(self._end.returned(result, self._given_loss))
        return self.finished(self.returned(result, trains=cursor.behind_backward))

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Surrounds each turn of the step function."""
        with self._end.refusing_draws(), self.state.swapped_in():
            yield
        if self._cursor.behind_backward:
            self.state.backward_reached()

    @contextmanager
    def running_again(self, stage: int) -> Iterator[None]:
        """Gives a forward that a backward of this stage repeats what it got at first."""

        def realise(item: Any) -> Any:
            if not isinstance(item, DeferredTensor):
                return item
            leaf = self.tensors.leaves.get((item.value, stage))
            return self._end.as_known(item) if leaf is None else leaf

        with Realised(realise):
            yield

    @property
    def is_behind_end(self) -> bool:
        """Whether the step function has left its program."""
        return self._cursor.behind_end

    def close(self) -> None:
        """Ends the microbatch, and leaves a step function that has not returned."""
        self._closing = True
        try:
            with self.state.swapped_in_to_leave():
                self._cursor.close()
        except Exception:
            # The batch has failed already, for a reason that must not be hidden.
            log.warning(
                "the step function raised while it was left in microbatch %d", self.index, exc_info=True
            )
        self.state.clear()
        self._end.clear()
        self._given_loss = None
        super().close()

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
        if (self._has_end or self._cursor.behind_end) and self._end.passes():
            return self._end.run(func, args, kwargs)
        if reads_values(func) and not self._cursor.rests_on_nothing(args, kwargs):
            args, kwargs = map_tree(self._end.here, (args, kwargs))
            return func(*args, **kwargs)
        try:
            instruction = self._cursor.operation(func, args, kwargs)
        except TraceMismatchError:
            if not self._end.passes(on_path=False):
                raise
            return self._end.run(func, args, kwargs)
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
        run = operation_run(func, instruction, self.program.boundary)
        with plain_torch() if run is not func or func in CALLS_UNITS else NOTHING:
            result = run(*args, **kwargs)
        self.generators.after_step(instruction)
        self.tensors.keep(instruction, result, args, kwargs, copied)
        return self._given(instruction, result, given)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit of this rank, or gives stand-ins for its result."""
        if self._closing:
            raise GreenletExit
        self._end.refuse_model()
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
            with self.keeping(instruction):
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
            self.loss, gradient = self._end.take_loss(loss, gradient)
        else:
            self._cursor.backward(loss)
            self.take_loss()
        self._end.posted.pass_backward()
        self.loss_gradient = gradient
        self._cursor.pause_for_backward()

    def model_begins(self) -> None:
        """Refuses a call of the model behind the end of the program."""
        self._end.refuse_model()

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
            self._cursor.wait_for_others()

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
                self._end.posted.pass_backward()
            except Exception as another:
                error.add_note(f"Nor could other ranks be told: {type(another).__name__}: {another}")
            raise
        is_behind_end = self._end.passes(on_path=self._cursor.is_through)
        self._end.posted.pass_backward()
        if not is_behind_end:
            self._cursor.end(result)
        return result

    def _check(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares a call with the trace, and records what it will change."""
        if instruction.expects:
            self._cursor.compare_arguments(instruction, args, kwargs)
        if instruction.spoils:
            self._cursor.note_spoilt(instruction, args, kwargs)
        if instruction.changes:
            self._end.posted.before_change(instruction.changes)

    def _note_seen(self, result: Any) -> None:
        """Records what code of the step function gets to see."""
        # Where nothing was read in the trace, what is read nevertheless is put up then.
        if self._has_end and in_step_code():
            self._end.note(result)

    def _begin(
        self, instruction: Instruction, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
        """Waits for the stage of a step; gives what `MicrobatchTensors.find` does."""
        self._cursor.enter(instruction.stage)
        copied: dict[int, Tensor] = {}
        if instruction.flow.finds:
            args, kwargs, copied = self.tensors.find(instruction, args, kwargs)
        self.generators.before_step(instruction, position - 1)
        return args, kwargs, copied


def _while_leaving(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation of a `finally` block while a step function is left; ends it if data is missing."""
    if any(isinstance(item, DeferredTensor) for item in flatten((args, kwargs))[0]):
        raise GreenletExit
    return func(*args, **kwargs)
