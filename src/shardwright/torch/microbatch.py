"""One microbatch on one rank: the user's step function, run stage by stage."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from greenlet import GreenletExit
from torch import Tensor, nn

from shardwright.comm.value_board import ValueBoard
from shardwright.errors import TraceError, TraceMismatchError, UsageError
from shardwright.torch.activation_checkpointing import call_recomputed
from shardwright.torch.attribute_content import AttributeContent, called_as_now, held_again
from shardwright.torch.coroutine import Coroutine
from shardwright.torch.crossings import Crossing
from shardwright.torch.deferred import DeferredTensor
from shardwright.torch.exchange import Returned
from shardwright.torch.filled_containers import FilledLists, given_the_same
from shardwright.torch.functions import NEED_HISTORY, OF_GRADIENT, gradient_of_backward, name_of_call
from shardwright.torch.glue import (
    GlueMode,
    Realised,
    call_without_hooks,
    plain_torch,
    refuse_gradient_inside_step,
    set_active_handler,
)
from shardwright.torch.glue_buffers import GlueBuffers
from shardwright.torch.instructions import Instruction, Place
from shardwright.torch.known_values import KnownValues
from shardwright.torch.loss_checks import refuse_second_backward, refuse_several_numbers, refuse_untrained
from shardwright.torch.microbatch_generators import MicrobatchGenerators
from shardwright.torch.microbatch_tensors import MicrobatchTensors
from shardwright.torch.module_hooks import OwnHooks
from shardwright.torch.own_attributes import OwnAttributes
from shardwright.torch.program import Program
from shardwright.torch.program_cursor import ProgramCursor
from shardwright.torch.python_random import get_python_mark
from shardwright.torch.source_line import user_line
from shardwright.torch.step_code import in_step_code, reads_values
from shardwright.torch.trace_comparison import TraceComparison
from shardwright.torch.tree import flatten, leaves, map_tree
from shardwright.torch.unforeseen_changes import refusing_changes

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
        parameters: Callable[[], Collection[int]] = frozenset,
        model: nn.Module | None = None,
        buffers: GlueBuffers | None = None,
        attributes: OwnAttributes | None = None,
        board: ValueBoard | None = None,
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
        self._left: dict[int, dict[tuple[nn.Module, str], AttributeContent]] = {}
        self._lists = FilledLists()
        self._closing = False
        # Of a `ReadingStep`: what it knows of other ranks, and whether it waits, or may wait, for that.
        self._known: KnownValues | None = None
        self._waits = self._may_wait = False
        self._given_loss: Tensor | None = None
        self._python_state: Any = None  # of the random numbers of Python, where every rank goes on
        if board is not None:
            self._known = KnownValues(
                index, program, self._cursor, self.tensors, board, self._wait_for_others, device
            )

    # ---- driven by the executor ----

    def forward(self, stage: int) -> None:
        """Runs the step function up to work of another stage of this rank, or backward, or the end."""
        if self._coroutine.finished or self.reached_backward:
            return
        if self._waits:
            self.stage = stage
            if self._cursor.has_work(stage):
                self._resume()
            return
        if self.waiting_for is not None and self.waiting_for != stage:
            return  # the stage has nothing to compute
        self.stage = stage
        self._resume()

    def to_send(self, crossing: Crossing) -> Tensor:
        """A value for another stage; zeros where the step function has left its program before."""
        tensor = self.tensors.values.get(crossing.value)
        if tensor is None and self.is_behind_end:
            spec = crossing.spec
            return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        return self.tensors.values[crossing.value]

    def come_to_backward(self) -> bool:
        """Goes on with a step function that waits for other ranks; False where it ends without a backward."""
        if self._waits:
            self._resume(may_wait=True)
        return self.reached_backward or not self._coroutine.finished

    def finish(self) -> Returned:
        """Runs what follows ``backward``, and gives back what the step function returned.

        Lets go of the rest: references in a circle (this object, its coroutine, its function) would keep
        tensors until Python's garbage collector comes by.
        """
        if not self._coroutine.finished:
            self._resume(may_wait=True)
        returned = self._returned(self._coroutine.result)
        self.close()
        return returned

    def _returned(self, result: Any) -> Returned:
        known = self._known
        if known is None or not known.is_behind_end:
            values = self.program.result_values
            loss_at = next((place for place, value in values if value == self.program.loss), None)
            return Returned(self.tensors.in_result(result), values, loss_at, self.reached_backward)
        items, structure = flatten(result)
        valued = [(place, known.value_of(item)) for place, item in enumerate(items)]
        return Returned(
            result=structure.rebuild([known.returned(item) for item in items]),
            values=tuple((place, value) for place, value in valued if value is not None),
            loss_at=next((place for place, item in enumerate(items) if item is self._given_loss), None),
            trains=self.reached_backward,
            behind_end=True,
        )

    def _resume(self, *, may_wait: bool = False) -> None:
        self._may_wait = may_wait
        if self.is_behind_end:
            self._python_state = get_python_mark()
        own = nullcontext() if self._attributes is None else self._attributes.of(self.index)
        with own, nullcontext() if self._hooks is None else self._hooks.in_force():
            self._coroutine.resume()
        if self.is_behind_end and get_python_mark() != self._python_state:
            self._cursor.refuse_draws()
        if self.reached_backward and self._attributes is not None:
            self._attributes.backward_reached(self.index)

    @contextmanager
    def running_again(self, stage: int) -> Iterator[None]:
        """For a backward of this stage: what its forward got is there again when it is recomputed."""

        def realise(item: Any) -> Any:
            if not isinstance(item, DeferredTensor):
                return item
            leaf = self.tensors.leaves.get((item.value, stage))
            if leaf is None and self._known is not None:
                return self._known.returned(item)
            return item if leaf is None else leaf

        with Realised(realise):
            yield

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
            with nullcontext() if self._hooks is None else self._hooks.in_force():
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
        if self._known is not None:
            self._known.clear()
        self.loss = self.loss_gradient = self._given_loss = None

    # ---- called by the step function ----

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a torch function between units, or gives stand-ins for its result."""
        if self._closing:
            return _while_leaving(func, args, kwargs)
        if func is Tensor.backward:
            return self.backward(args[0], gradient_of_backward(*args[1:], **kwargs))
        known = self._known if in_step_code() else None
        if known is not None:
            if self._leaves_program():
                return self._operate_behind_end(func, args, kwargs)
            if reads_values(func) and not self._cursor.rests_on_nothing(args, kwargs):
                args, kwargs = map_tree(known.here, (args, kwargs))
                return func(*args, **kwargs)
        try:
            instruction = self._cursor.operation(func, args, kwargs)
        except TraceMismatchError:
            if known is None or not self._leaves_program(on_path=False):
                raise
            return self._operate_behind_end(func, args, kwargs)
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
            return _stand_in(instruction, args, kwargs)
        given = self._given_back(instruction, args, kwargs)
        args, kwargs, copied = self._begin(instruction, position, args, kwargs)
        result = func(*args, **kwargs)
        self.generators.after_step(instruction)
        self._cursor.note_made(result, given, instruction.values)
        if known is not None:
            known.note(result)
        return self.tensors.keep(instruction, result, args, kwargs, copied)

    def _operate_behind_end(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Executes an operation that is no part of the program, as every rank does."""
        assert self._known is not None
        if func in NEED_HISTORY:
            self._known.refuse_history(name_of_call(func), (args, kwargs))
        if func in OF_GRADIENT and not self._cursor.is_free(args[0]):
            refuse_gradient_inside_step()
        args, kwargs = map_tree(self._known.here, (args, kwargs))
        generators = [item for item in flatten((args, kwargs))[0] if isinstance(item, torch.Generator)]
        with self._known.refusing_changes():
            return self._cursor.run_behind_end(func, args, kwargs, generators)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit of this rank, or gives stand-ins for its result."""
        if self._closing:
            raise GreenletExit
        self._refuse_behind_end()
        instruction = self._cursor.unit_call(module)
        position = self._cursor.position
        own = args, kwargs
        args, kwargs = self._lists.without_appended(own)
        self._check(instruction, args, kwargs)
        if instruction.place is Place.ELSEWHERE:
            for owner, key, deferred in instruction.attributes:
                vars(owner)[key] = deferred
            if instruction.passed_attributes:
                items = flatten((args, kwargs))[0]
                for owner, key, place in instruction.passed_attributes:
                    vars(owner)[key] = items[place]
            return _stand_in(instruction, args, kwargs)
        given = self._given_back(instruction, args, kwargs)
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
                result = _copied_out(result, instruction.own_results)
            self._cursor.note_made(result, given, instruction.values)
            self._note_seen(result)  # by the step function, if that has called it itself
            for place, (owner, key, _) in enumerate(instruction.attributes, start=instruction.num_results):
                self._cursor.note_made(vars(owner)[key], (), {0: instruction.values[place]})
            if instruction.leaves and self.program.backward_at is not None:
                left = self._left.setdefault(instruction.stage, {})
                left.update((place, AttributeContent.of(*place)) for place in instruction.leaves)
            return self.tensors.keep(instruction, result, args, kwargs, copied)

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Hands the loss to the executor; comes back when this microbatch has no backward left here."""
        if self._closing:
            raise GreenletExit
        self._given_loss = loss
        if in_step_code() and self._leaves_program(on_path=self._cursor.is_at_backward):
            loss, gradient = self._loss_behind_end(loss, gradient)
        else:
            self._cursor.backward()
            self._comparison.loss(loss)
            if self.program.loss_stage in self.program.stages:
                assert self.program.loss is not None
                self.loss = self.tensors.values[self.program.loss]
        if self._known is not None:
            self._known.pass_backward()
        self.loss_gradient = gradient
        self.reached_backward = True
        self._coroutine.pause()

    def model_begins(self) -> None:
        """The step function calls the model."""
        self._refuse_behind_end()

    def _refuse_behind_end(self) -> None:
        """Refuses calls of modules behind the end of the program."""
        if self._known is None or not (self.is_behind_end or self._cursor.is_at_end):
            return
        if self.reached_backward:
            raise UsageError(
                f"{user_line()}: the model is called again behind backward(), in a step function that reads "
                "values of tensors, or may do so by print(), int(), float() or the like: what stages have to "
                "do is known up to its backward. Call the model again before backward(), or in another step "
                "function."
            )
        raise UsageError(
            f"{user_line()}: the model is called again behind a value that the step function has read, so "
            "that nobody could know what the stages have to do. Call the model first, and read values then; "
            "or read them in another step function."
        )

    def model_returned(self, result: Any) -> None:
        """Takes note of what the step function gets to see; leaves it here where it will have to wait.

        Not in the middle of what follows: ``total += loss.item()`` would add to a total of before, if another
        microbatch came in between.
        """
        self._note_seen(result)
        if self._known is None or not self.program.ends or not in_step_code():
            return
        waits = any(isinstance(item, DeferredTensor) for item in leaves(result))
        if waits and not self._cursor.has_work():
            self._wait_for_others()

    def _note_seen(self, result: Any) -> None:
        if self._known is not None and in_step_code():
            self._known.note(result)

    # ---- behind the end of the program ----

    def _wait_for_others(self, home: int | None = None) -> None:
        """Leaves the step function until this rank has nothing else to do.

        Not where its stage has work left, for which other ranks wait: a value of an earlier stage was made
        before that.

        Args:
            home: the stage of the value that it waits for.

        Raises:
            TraceMismatchError: a later stage makes it, which waits for this one's work.
        """
        while not self._may_wait:
            if self._cursor.has_work(self.stage):
                if home is not None and home > self.stage:
                    self._refuse_before_work()
                break
            self._waits = True
            self._pause()
        self._waits = False

    def _refuse_before_work(self) -> NoReturn:
        raise TraceMismatchError(
            f"{user_line()}: the step function reads a value here that it did not read when it was traced, "
            "of a later stage than the one that computes what follows. Compute all that the loss is made of "
            "first, and read values then."
        )

    def _end_program(self) -> None:
        """What follows is run by every rank, as it is; takes what stages have sent for the rest before."""
        assert self._known is not None
        for instruction in self._cursor.rest:
            if isinstance(instruction.func, nn.Module):
                self._cursor.mismatch("nothing more")
            if instruction.place is Place.HERE:
                if instruction.stage != self.stage:
                    self._enter(instruction.stage)
                for _, value in instruction.flow.cuts:
                    self.tensors.leaf(value, instruction.stage)
        self._known.end_program()
        self._python_state = get_python_mark()

    @property
    def is_behind_end(self) -> bool:
        """Whether the step function has left its program: every rank runs what follows."""
        return self._known is not None and self._known.is_behind_end

    def _leaves_program(self, *, on_path: bool = True) -> bool:
        """Whether code of the step function is behind the end of the program, which it may have come to now.

        Args:
            on_path: what it does is what the trace has next; the program ends where it is not, if no unit
                is left.
        """
        if self._known is None:
            return False
        cursor = self._cursor
        if not self.is_behind_end and (cursor.is_at_end or (not on_path and not cursor.has_units_left)):
            self._end_program()
        return self.is_behind_end

    def _loss_behind_end(self, loss: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss and its gradient as this rank has them; the rank that computes it notes it."""
        assert self._known is not None
        refuse_second_backward(self.reached_backward)
        refuse_several_numbers(loss, gradient)
        if self.program.loss_stage is None:
            raise TraceError(
                f"{user_line()}: backward is called, but what the model returned does not depend on any "
                "trained parameter, so there is nothing to train. Do not call the model under no_grad()."
            )
        if self.program.loss_stage in self.program.stages:
            loss = self._known.here(loss)
            refuse_untrained(loss.requires_grad)
            self.loss, gradient = loss, self._known.here(gradient)
        return loss, gradient

    # ---- inside ----

    def _check(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares a call with the trace, and takes note of what it will change."""
        if instruction.expects:
            self._comparison.arguments(instruction, args, kwargs)
        if instruction.spoils:
            self._cursor.note_spoilt(instruction, args, kwargs)
        if instruction.changes and self._known is not None:
            self._known.before_change(instruction.changes)

    def _run(self) -> Any:
        assert self._arguments is not None
        args, kwargs = self._arguments
        self._arguments = None
        set_active_handler(self)
        try:
            with GlueMode(self):
                result = self._function(*args, **kwargs)
        except Exception as error:
            if self._known is not None:
                self._put_up_behind(error, self._known)
            raise
        known = self._known
        if known is not None:
            is_behind_end = self._leaves_program(on_path=self._cursor.is_through)
            known.pass_backward()
            if is_behind_end:
                return result
        self._cursor.end()
        self._comparison.result(result)
        return result

    @staticmethod
    def _put_up_behind(error: Exception, known: KnownValues) -> None:
        """Puts up what other ranks need to come to the same error, which is the one that counts."""
        try:
            known.pass_backward()
        except Exception as another:
            error.add_note(f"Nor could other ranks be told: {type(another).__name__}: {another}")

    def _given_back(
        self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """The free tensors among the arguments that a step gives back as they are."""
        if not instruction.passed:
            return []
        items = flatten((args, kwargs))[0]
        passed = (items[source] for _, source in instruction.passed)
        return [item for item in passed if self._cursor.is_free(item)]

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
        """Leaves the step function before its backward; others may read meanwhile what it has made."""
        if self._known is not None:
            self._known.before_pause()
        self._coroutine.pause()

    def set_next_generators(self) -> None:
        """Gives the generators the state from which the next step of this rank draws, if one does."""
        self.generators.set_for_next(self._cursor.position)


def _while_leaving(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a `finally` block computes when a step function is left; the block ends where data is missing."""
    if any(isinstance(item, DeferredTensor) for item in flatten((args, kwargs))[0]):
        raise GreenletExit
    return func(*args, **kwargs)


def _copied_out(result: Any, positions: Iterable[int]) -> Any:
    """Copies what a unit gives in memory of its own, which other microbatches would find overwritten."""
    items, structure = flatten(result)
    for position in positions:
        items[position] = items[position].clone()
    return structure.rebuild(items)


def _recomputed(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call_recomputed(module, call, args, kwargs)


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
