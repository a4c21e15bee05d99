"""One microbatch on one rank: runs the user's step function, stage by stage."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from greenlet import GreenletExit
from torch import Tensor, nn

from shardwright.runtime.crossings import Crossing
from shardwright.torch._private import put_parametrization_cache
from shardwright.torch.backward.activation_checkpointing import call_recomputed
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatch_generators import MicrobatchGenerators
from shardwright.torch.execution.microbatch_tensors import MicrobatchTensors
from shardwright.torch.execution.own_attributes import OwnAttributes, called_as_now, held_again
from shardwright.torch.execution.program_cursor import ProgramCursor
from shardwright.torch.execution.trace_comparison import TraceComparison
from shardwright.torch.interception.attribute_inputs import with_found
from shardwright.torch.interception.coroutine import Coroutine
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.glue import (
    GlueMode,
    Realised,
    call_without_hooks,
    plain_torch,
    set_active_handler,
)
from shardwright.torch.program.instructions import Instruction, Place
from shardwright.torch.program.program import Program
from shardwright.torch.program.refused_changes import refusing_changes
from shardwright.torch.program.step_results import copied_out, given_back, stand_in, with_stand_ins
from shardwright.torch.python_state.filled_containers import FilledLists, given_the_same
from shardwright.torch.python_state.snapshot import SlotContent
from shardwright.torch.pytorch.functions import CALLS_UNITS, gradient_of_backward
from shardwright.torch.pytorch.module_hooks import OwnHooks
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.glue_buffers import GlueBuffers

__all__ = ["Microbatch"]

log = logging.getLogger(__name__)


class Microbatch:
    """The handler of a step function while it runs.

    Attributes:
        index: which microbatch.
        program: what this rank does.
        stage: the stage being run.
        waiting_for: the next stage of this rank that has work; None before the start.
        loss: the loss, on the rank that computes it.
        loss_gradient: gradient that the user gave to ``backward``.
        tensors: what it keeps beside the user's variables.
        generators: random numbers of its steps.
        uses: id of a weight -> contributions to its gradient that are still to come.
        is_behind_end: the step function has left its program (only a `ReadingMicrobatch` does).
    """

    intercepts = True
    is_behind_end = False

    def __init__(
        self,
        index: int,
        program: Program,
        function: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        receive: Callable[[int, Crossing], Tensor],
        *,
        device: torch.device,
        parameters: Callable[[], Collection[int]] = frozenset,
        model: nn.Module | None = None,
        buffers: GlueBuffers | None = None,
        attributes: OwnAttributes | None = None,
    ):
        self.index = index
        self.program = program
        self.stage = -1
        self.waiting_for: int | None = None
        self.loss: Tensor | None = None
        self.loss_gradient: Tensor | None = None
        self.reached_backward = False
        self.tensors = MicrobatchTensors(index, program, receive, buffers)
        self.uses: dict[int, int] = {}
        self._cursor = ProgramCursor(index, program, parameters, device)
        self._device = device
        self.generators = MicrobatchGenerators(index, device)
        self._comparison = TraceComparison(index, program)
        self._function = function
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = arguments
        self._coroutine = Coroutine(self._run)
        self._hooks = OwnHooks(model) if program.temporary_hooks and model is not None else None
        self._attributes = attributes
        self._backwards_left = len(program.stages)
        # Of each stage, what its units left in attributes of their own.
        self._left: dict[int, dict[tuple[nn.Module, str], SlotContent]] = {}
        self._lists = FilledLists()
        self._parametrizations: tuple[int, dict[Any, Any]] | None = None
        self._closing = False

    # ---- driven by the executor ----

    def forward(self, stage: int) -> None:
        """Runs the step function up to work of another stage of this rank, or backward, or the end."""
        if self._coroutine.finished or self.reached_backward:
            return
        if self.waiting_for is not None and self.waiting_for != stage:
            return  # the stage has nothing to compute
        self.stage = stage
        self._resume()

    def to_send(self, crossing: Crossing) -> Tensor:
        """A value for another stage."""
        return self.tensors.values[crossing.value]

    def come_to_backward(self) -> bool:
        """Whether the step function has called ``backward``, or may still do so."""
        return self.reached_backward or not self._coroutine.finished

    def finish(self) -> Returned:
        """Runs the code after ``backward``, and returns what the step function returned.

        Lets go of the rest: references in a circle (this object, its coroutine, its function) would keep
        tensors until Python's garbage collector comes by.
        """
        if not self._coroutine.finished:
            self._resume()
        returned = self._returned(self._coroutine.result)
        self.close()
        return returned

    def _returned(self, result: Any) -> Returned:
        values = self.program.result_values
        loss_at = next((place for place, value in values if value == self.program.loss), None)
        return Returned(self.tensors.in_result(result), values, loss_at, self.reached_backward)

    def _resume(self) -> None:
        own = nullcontext() if self._attributes is None else self._attributes.of(self.index)
        with own, self._in_force():
            self._coroutine.resume()
        if self.reached_backward and self._attributes is not None:
            self._attributes.backward_reached(self.index)

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        """Has the step function find its own hooks and cached weights, and leaves those of others alone."""
        outside = put_parametrization_cache(self._parametrizations)
        try:
            with nullcontext() if self._hooks is None else self._hooks.in_force():
                yield
        finally:
            self._parametrizations = put_parametrization_cache(outside)

    @contextmanager
    def running_again(self, stage: int) -> Iterator[None]:
        """For a backward of this stage: what its forward got is there again when it is recomputed."""

        def realise(item: Any) -> Any:
            if not isinstance(item, DeferredTensor):
                return item
            leaf = self.tensors.leaves.get((item.value, stage))
            return self._as_known(item) if leaf is None else leaf

        with Realised(realise):
            yield

    def _as_known(self, item: DeferredTensor) -> Any:
        """What this rank has of a tensor of another one."""
        return item

    @contextmanager
    def as_left(self, stage: int) -> Iterator[None]:
        """For a backward of this stage: what the microbatch left in attributes is there again.

        A reversible layer, for example, keeps the state of the generator in its own.
        """
        left = self._left.pop(stage, {})
        own = nullcontext() if self._attributes is None else self._attributes.again_for(self.index)
        with own, held_again(list(left.values())):
            yield

    def backward_ran(self) -> None:
        """The backward of one stage has ended, but for gradients of weights that are left for later."""
        self._backwards_left -= 1
        if self._backwards_left == 0 and self._attributes is not None:
            self._attributes.backward_done(self.index)

    def close(self) -> None:
        """Ends a microbatch: a step function that has not returned is left."""
        self._closing = True
        try:
            with self._in_force():
                self._coroutine.close()
        except Exception:
            # The batch has failed already, for a reason that must not be hidden.
            log.warning(
                "the step function raised while it was left in microbatch %d", self.index, exc_info=True
            )
        self._coroutine = _ENDED
        self._left.clear()
        self._lists.clear()
        self._cursor.clear()
        self.tensors.clear()
        self.loss = self.loss_gradient = None

    # ---- called by the step function ----

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a torch function between units, or gives stand-ins for its result."""
        if self._closing:
            return _while_leaving(func, args, kwargs)
        if func is Tensor.backward:
            return self.backward(args[0], gradient_of_backward(*args[1:], **kwargs))
        return self._operate(func, args, kwargs)

    def _operate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._execute(self._cursor.operation(func, args, kwargs), func, args, kwargs)

    def _execute(
        self,
        instruction: Instruction | None,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if instruction is None:
            return self._cursor.run_unknown(func, args, kwargs)
        position = self._cursor.position
        if instruction.place is Place.FREE:
            self.generators.before_step(instruction, position - 1)
            result = func(*args, **kwargs)
            self.generators.after_step(instruction)
            return result
        self._check(instruction, args, kwargs)
        if instruction.place is Place.ELSEWHERE:
            return stand_in(instruction, args, kwargs)
        given = given_back(instruction, args, kwargs, is_free=self._cursor.is_free)
        args, kwargs, copied = self._begin(instruction, position, args, kwargs)
        with plain_torch() if func in CALLS_UNITS else nullcontext():
            result = func(*args, **kwargs)
        self.generators.after_step(instruction)
        self.tensors.keep(instruction, result, args, kwargs, copied)
        result = with_stand_ins(result, given)
        self._cursor.note_made(result, given.values(), instruction.values)
        self._note_seen(result)
        return result

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit of this rank, or gives stand-ins for its result."""
        if self._closing:
            raise GreenletExit
        instruction = self._cursor.unit_call(module)
        position = self._cursor.position
        own = args, with_found(kwargs, instruction.found) if instruction.found else kwargs
        args, kwargs = self._lists.without_appended(own)
        self._check(instruction, args, kwargs)
        if instruction.place is Place.ELSEWHERE:
            for owner, key, deferred in instruction.attributes:
                vars(owner)[key] = deferred
            if instruction.passed_attributes:
                items = flatten((args, kwargs))[0]
                for owner, key, place in instruction.passed_attributes:
                    vars(owner)[key] = items[place]
            return stand_in(instruction, args, kwargs)
        given = given_back(instruction, args, kwargs, is_free=self._cursor.is_free)
        with plain_torch():
            args, kwargs, copied = self._begin(instruction, position, args, kwargs)
            call: Callable[..., Any] = partial(call_without_hooks, module)
            fills = instruction.fills or self._lists.are_filled
            allowed = instruction.flow.may_change
            if allowed is not None and not fills:
                line, index = instruction.line, self.index
                call = refusing_changes(call, module, allowed, line=line, microbatch=index)
            if instruction.recompute:
                call = called_as_now(call, instruction.finds)
                call = partial(_recomputed, module, given_the_same(call) if fills else call)
            if fills:
                result = self._lists.called(call, own, (args, kwargs))
                args, kwargs = self._lists.without_appended((args, kwargs))
            else:
                result = call(*args, **kwargs)
            self.generators.after_step(instruction)
            if instruction.own_results:
                result = copied_out(result, instruction.own_results)
            self.tensors.keep(instruction, result, args, kwargs, copied)
            result = with_stand_ins(result, given)
            self._cursor.note_made(result, given.values(), instruction.values)
            self._note_seen(result)  # by the step function, if that has called it itself
            for place, (owner, key, _) in enumerate(instruction.attributes, start=instruction.num_results):
                self._cursor.note_made(vars(owner)[key], (), {0: instruction.values[place]})
            if instruction.leaves and self.program.backward_at is not None:
                left = self._left.setdefault(instruction.stage, {})
                left.update((place, SlotContent.of(*place)) for place in instruction.leaves)
            return result

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Hands the loss to the executor; comes back when this microbatch has no backward left here."""
        if self._closing:
            raise GreenletExit
        self.loss_gradient = self._take_loss(loss, gradient)
        self.reached_backward = True
        self._coroutine.pause()

    def _take_loss(self, loss: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Keeps the loss, on the rank that computes it; gives its gradient as this rank has it."""
        self._cursor.backward()
        self._comparison.loss(loss)
        if self.program.loss_stage in self.program.stages:
            assert self.program.loss is not None
            self.loss = self.tensors.values[self.program.loss]
        return gradient

    def model_begins(self) -> None:
        """The step function calls the model."""

    def model_returned(self, result: Any) -> None:
        """The call of the model has ended."""

    def _note_seen(self, result: Any) -> None:
        """The code of the step function gets to see what a step has made."""

    # ---- inside ----

    def _check(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares a call with the trace, and takes note of what it will change."""
        if instruction.expects:
            self._comparison.arguments(instruction, args, kwargs)
        if instruction.spoils:
            self._cursor.note_spoilt(instruction, args, kwargs)

    def _run(self) -> Any:
        assert self._arguments is not None
        args, kwargs = self._arguments
        self._arguments = None
        set_active_handler(self)
        result = self._call(args, kwargs)
        self._end(result)
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with GlueMode(self):
            return self._function(*args, **kwargs)

    def _end(self, result: Any) -> None:
        """The step function has returned."""
        self._cursor.end()
        self._comparison.result(result)

    def _begin(
        self, instruction: Instruction, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
        """Waits for the stage of a step; gives what `MicrobatchTensors.find` does."""
        if instruction.stage != self.stage:
            self._enter(instruction.stage)
        copied: dict[int, Tensor] = {}
        if instruction.flow.finds:
            args, kwargs, copied = self.tensors.find(instruction, args, kwargs)
        self.generators.before_step(instruction, position - 1)
        return args, kwargs, copied

    def _enter(self, stage: int) -> None:
        """Pauses until the executor runs this stage."""
        self.waiting_for = stage
        while self.stage != stage:
            self._pause()

    def _pause(self) -> None:
        """Leaves the step function before its backward."""
        self._coroutine.pause()

    def set_next_generators(self) -> None:
        """Gives the generators the state from which the next step of this rank draws, if one does."""
        self.generators.set_for_next(self._cursor.position)


def _while_leaving(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a `finally` block computes when a step function is left; the block ends where data is missing."""
    if any(isinstance(item, DeferredTensor) for item in flatten((args, kwargs))[0]):
        raise GreenletExit
    return func(*args, **kwargs)


def _recomputed(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call_recomputed(module, call, args, kwargs)


_ENDED = Coroutine(lambda: None)
