"""One microbatch on one rank: the user's step function, run stage by stage."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from greenlet import GreenletExit
from torch import Tensor, nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.activation_checkpointing import call_recomputed
from shardwright.torch.attribute_content import AttributeContent, held_again
from shardwright.torch.coroutine import Coroutine
from shardwright.torch.deferred import DeferredTensor
from shardwright.torch.functions import gradient_of_backward, name_of_call
from shardwright.torch.glue import GlueMode, Realised, call_without_hooks, plain_torch, set_active_handler
from shardwright.torch.glue_buffers import GlueBuffers
from shardwright.torch.microbatch_tensors import MicrobatchTensors
from shardwright.torch.module_hooks import OwnHooks
from shardwright.torch.own_attributes import OwnAttributes
from shardwright.torch.program import Crossing, Instruction, Place, Program
from shardwright.torch.rng import GeneratorState, set_state
from shardwright.torch.source_line import user_line
from shardwright.torch.tree import flatten

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
        generator_states: position of a step that draws random numbers -> state of the generators before it.
        uses: id of a weight -> contributions to its gradient that are still to come.
    """

    def __init__(
        self,
        index: int,
        program: Program,
        function: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        receive: Callable[[int, Crossing], Tensor],
        *,
        device: torch.device,
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
        self._instructions = program.instructions
        self._position = 0
        self._device = device
        self.generator_states: dict[int, GeneratorState] = {}
        self._function = function
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = arguments
        self._coroutine = Coroutine(self._run)
        self._hooks = OwnHooks(model) if program.temporary_hooks and model is not None else None
        self._attributes = attributes
        # Of each stage, what its units left in attributes of their own.
        self._left: dict[int, dict[tuple[nn.Module, str], AttributeContent]] = {}
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

    def finish(self) -> Any:
        """Runs what follows ``backward``, and gives back what the step function returned.

        Lets go of the rest: references in a circle (this object, its coroutine, its function) would keep
        tensors until Python's garbage collector comes by.
        """
        if not self._coroutine.finished:
            self._resume()
        result = self.tensors.in_result(self._coroutine.result)
        self.close()
        return result

    def _resume(self) -> None:
        own = nullcontext() if self._attributes is None else self._attributes.of(self.index)
        with own, nullcontext() if self._hooks is None else self._hooks.in_force():
            self._coroutine.resume()
        if self.reached_backward and self._attributes is not None:
            self._attributes.backward_reached(self.index)

    def remembering(self, stage: int) -> Realised:
        """For a backward of this stage: what its forward got is there again when it is recomputed."""

        def realise(item: Any) -> Any:
            if not isinstance(item, DeferredTensor):
                return item
            leaf = self.tensors.leaves.get((item.value, stage))
            return item if leaf is None else leaf

        return Realised(realise)

    def as_units_left(self, stage: int) -> AbstractContextManager[None]:
        """For a backward of this stage: what its units left in their own attributes is there again.

        A reversible layer, for example, keeps the state of the generator there.
        """
        left = self._left.pop(stage, None)
        return nullcontext() if left is None else held_again(list(left.values()))

    def close(self) -> None:
        """Ends a microbatch: a step function that has not returned is left."""
        self._closing = True
        try:
            with nullcontext() if self._hooks is None else self._hooks.in_force():
                self._coroutine.close()
        except Exception:
            # The batch has failed already, for a reason that must not be hidden.
            log.warning(
                "the step function raised while it was left in microbatch %d", self.index, exc_info=True
            )
        self._coroutine = _ENDED
        self._left.clear()
        self.tensors.clear()
        self.loss = self.loss_gradient = None

    # ---- called by the step function ----

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a torch function between units, or gives stand-ins for its result."""
        if self._closing:
            return _while_leaving(func, args, kwargs)
        if func is Tensor.backward:
            return self.backward(args[0], gradient_of_backward(*args[1:], **kwargs))
        instruction = self._next(func)
        position = self._position
        if instruction.place is Place.FREE:
            if instruction.draws:
                self._restore_generators(position)
            return func(*args, **kwargs)
        if instruction.place is Place.ELSEWHERE:
            return _stand_in(instruction, args, kwargs)
        args, kwargs, copied = self._begin(instruction, position, args, kwargs)
        return self.tensors.keep(instruction, func(*args, **kwargs), args, kwargs, copied)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit of this rank, or gives stand-ins for its result."""
        if self._closing:
            raise GreenletExit
        instruction = self._next(module)
        position = self._position
        if instruction.place is Place.ELSEWHERE:
            for owner, key, deferred in instruction.attributes:
                vars(owner)[key] = deferred
            return _stand_in(instruction, args, kwargs)
        with plain_torch():
            args, kwargs, copied = self._begin(instruction, position, args, kwargs)
            if instruction.recompute:
                result = call_recomputed(module, partial(call_without_hooks, module), args, kwargs)
            else:
                result = call_without_hooks(module, *args, **kwargs)
            if instruction.leaves and self.program.backward_at is not None:
                left = self._left.setdefault(instruction.stage, {})
                left.update((place, AttributeContent.of(*place)) for place in instruction.leaves)
            return self.tensors.keep(instruction, result, args, kwargs, copied)

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Hands the loss to the executor; comes back when this microbatch has no backward left here."""
        if self._closing:
            raise GreenletExit
        if self._position != self.program.backward_at:
            self._mismatch("backward()")
        if self.program.loss_stage in self.program.stages:
            assert self.program.loss is not None
            self.loss = self.tensors.values[self.program.loss]
        self.loss_gradient = gradient
        self.reached_backward = True
        self._coroutine.pause()

    # ---- inside ----

    def _run(self) -> Any:
        assert self._arguments is not None
        args, kwargs = self._arguments
        self._arguments = None
        set_active_handler(self)
        with GlueMode(self):
            return self._function(*args, **kwargs)

    def _next(self, func: Any) -> Instruction:
        try:
            instruction = self._instructions[self._position]
        except IndexError:
            self._mismatch(name_of_call(func))
        if instruction.func is not func and instruction.func != func:
            self._mismatch(name_of_call(func))
        self._position += 1
        return instruction

    def _mismatch(self, found: str) -> NoReturn:
        position = self._position
        expected = "the end of the step function"
        if position == self.program.backward_at:
            expected = "backward()"
        elif position < len(self._instructions):
            expected = name_of_call(self._instructions[position].func)
        raise TraceMismatchError(
            f"{user_line()}: microbatch {self.index} calls {found} where the trace has {expected}. The "
            "model takes another path than when it was traced, for a reason that the batch does not "
            "show: a random choice, a counter, a global. Make the path the same in every microbatch, or "
            "put the choice inside one module."
        )

    def _begin(
        self, instruction: Instruction, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
        """Waits for the stage of a step; gives what `MicrobatchTensors.find` does."""
        if instruction.stage != self.stage:
            self._enter(instruction.stage)
        copied: dict[int, Tensor] = {}
        if instruction.flow.finds:
            args, kwargs, copied = self.tensors.find(instruction, args, kwargs)
        if instruction.draws:
            self._restore_generators(position)
        return args, kwargs, copied

    def _enter(self, stage: int) -> None:
        """Pauses until the executor runs this stage."""
        self.waiting_for = stage
        while self.stage != stage:
            self._coroutine.pause()

    def _restore_generators(self, position: int) -> None:
        """Makes random numbers those that a plain loop would draw here."""
        state = self.generator_states.get(position - 1)
        if state is not None:
            set_state(state, self._device)


def _while_leaving(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a `finally` block computes when a step function is left; the block ends where data is missing."""
    if any(isinstance(item, DeferredTensor) for item in flatten((args, kwargs))[0]):
        raise GreenletExit
    return func(*args, **kwargs)


_ENDED = Coroutine(lambda: None)


def _stand_in(instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a step that another rank executes."""
    structure, result = instruction.structure, instruction.result
    assert structure is not None
    if instruction.passed:
        items = flatten((args, kwargs))[0]
        filled = list(result)
        for position, source in instruction.passed:
            filled[position] = items[source]
        return structure.rebuild(filled)
    return structure.rebuild(result)
