"""One microbatch, on one rank, of a step function that may read tensor values."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.comm.trust.value_board import ValueBoard
from shardwright.errors import TraceError, TraceMismatchError, UsageError
from shardwright.runtime.crossings import Crossing
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.known_values import KnownValues
from shardwright.torch.execution.microbatch import Microbatch
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.glue import refuse_gradient_inside_step
from shardwright.torch.interception.loss_checks import (
    refuse_gradient_of,
    refuse_second_backward,
    refuse_several_numbers,
    refuse_untrained,
)
from shardwright.torch.interception.step_code import in_step_code, reads_values
from shardwright.torch.program.instructions import Instruction, Place
from shardwright.torch.pytorch.functions import NEED_HISTORY, OF_GRADIENT, name_of_call
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tree import flatten, leaves, map_tree
from shardwright.torch.randomness.python_random import get_python_mark

__all__ = ["ReadingMicrobatch"]


class ReadingMicrobatch(Microbatch):
    """The handler of a `ReadingStep` while it runs.

    The trace of such a step ends where it reads a value, or does what it may do by a value; so does the
    program. What follows, every rank runs as it is, with values that others have put up (`KnownValues`)::

        output = model(batch)          program: each rank runs its stages
        loss = criterion(output)       program: on the rank of the last stage
        if loss.item() > 10: ...       behind its end: on every rank

    Args:
        args: as a `Microbatch` takes them.
        board: where ranks put up values.
        settings: as a `Microbatch` takes them.
    """

    def __init__(self, *args: Any, board: ValueBoard, **settings: Any):
        super().__init__(*args, **settings)
        self._known = KnownValues(
            self.index, self.program, self._cursor, self.tensors, board, self._wait_for_others, self._device
        )
        # Whether it waits for other ranks now, and whether it may block this one.
        self._waits = self._may_block = False
        self._given_loss: Tensor | None = None
        self._python_state: Any = None  # of the random numbers of Python, where every rank goes on

    # ---- driven by the executor ----

    def forward(self, stage: int) -> None:
        """See `Microbatch.forward`; a step function that waits goes on if a stage has work in it."""
        self._may_block = False
        if not self._waits:
            super().forward(stage)
        elif not self._coroutine.finished and not self.reached_backward:
            self.stage = stage
            if self._cursor.has_work(stage):
                self._resume()

    def to_send(self, crossing: Crossing) -> Tensor:
        """A value for another stage; zeros where the step function has left its program before."""
        if crossing.value in self.tensors.values or not self.is_behind_end:
            return super().to_send(crossing)
        spec = crossing.spec
        return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)

    def come_to_backward(self) -> bool:
        """Resumes a step function that waits for other ranks; False where it ends without a backward."""
        self._may_block = True
        if self._waits:
            self._resume()
        return super().come_to_backward()

    def finish(self) -> Returned:
        """See `Microbatch.finish`."""
        self._may_block = True
        return super().finish()

    def close(self) -> None:
        """See `Microbatch.close`."""
        super().close()
        self._known.clear()
        self._given_loss = None

    def _resume(self) -> None:
        if self.is_behind_end:
            self._python_state = get_python_mark()
        super()._resume()
        if self.is_behind_end and get_python_mark() != self._python_state:
            self._cursor.refuse_draws()

    def _returned(self, result: Any) -> Returned:
        if not self.is_behind_end:
            return super()._returned(result)
        items, structure = flatten(result)
        valued = [(place, self._known.value_of(item)) for place, item in enumerate(items)]
        return Returned(
            result=structure.rebuild([self._known.returned(item) for item in items]),
            values=tuple((place, value) for place, value in valued if value is not None),
            loss_at=next((place for place, item in enumerate(items) if item is self._given_loss), None),
            trains=self.reached_backward,
            behind_end=True,
        )

    def _as_known(self, item: DeferredTensor) -> Any:
        return self._known.returned(item)

    # ---- called by the step function ----

    def _operate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not in_step_code():
            return super()._operate(func, args, kwargs)
        # The first question is all that most operations are asked: nothing has ended, or will, as traced.
        if (self.program.ends or self.is_behind_end) and self._leaves_program():
            return self._operate_behind_end(func, args, kwargs)
        if reads_values(func) and not self._cursor.rests_on_nothing(args, kwargs):
            args, kwargs = map_tree(self._known.here, (args, kwargs))
            return func(*args, **kwargs)
        try:
            instruction = self._cursor.operation(func, args, kwargs)
        except TraceMismatchError:
            if not self._leaves_program(on_path=False):
                raise
            return self._operate_behind_end(func, args, kwargs)
        return self._execute(instruction, func, args, kwargs)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Microbatch.unit_call`."""
        if not self._closing:
            self._refuse_behind_end()
        return super().unit_call(module, args, kwargs)

    def model_begins(self) -> None:
        """The step function calls the model."""
        self._refuse_behind_end()

    def model_returned(self, result: Any) -> None:
        """Records what the step function gets to see; leaves it here where it will have to wait.

        Not in the middle of what follows: ``total += loss.item()`` would add to a total of before, if another
        microbatch came in between.
        """
        self._note_seen(result)
        if not self.program.ends or not in_step_code():
            return
        waits = any(isinstance(item, DeferredTensor) for item in leaves(result))
        if waits and not self._cursor.has_work():
            self._wait_for_others()

    def _note_seen(self, result: Any) -> None:
        # Where nothing was read in the trace, what is read nevertheless is put up then.
        if self.program.ends and in_step_code():
            self._known.note(result)

    def _take_loss(self, loss: Tensor, gradient: Tensor | None) -> Tensor | None:
        self._given_loss = loss
        if in_step_code() and self._leaves_program(on_path=self._cursor.is_at_backward):
            gradient = self._take_loss_behind_end(loss, gradient)
        else:
            gradient = super()._take_loss(loss, gradient)
        self._known.pass_backward()
        return gradient

    def _check(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._check(instruction, args, kwargs)
        if instruction.changes:
            self._known.before_change(instruction.changes)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super()._call(args, kwargs)
        except Exception as error:
            # Other ranks need values to come to the same error, which is the one that counts.
            try:
                self._known.pass_backward()
            except Exception as another:
                error.add_note(f"Nor could other ranks be told: {type(another).__name__}: {another}")
            raise

    def _end(self, result: Any) -> None:
        is_behind_end = self._leaves_program(on_path=self._cursor.is_through)
        self._known.pass_backward()
        if not is_behind_end:
            super()._end(result)

    def _pause(self) -> None:
        """See `Microbatch._pause`; others may read meanwhile what it has made."""
        self._known.before_pause()
        super()._pause()

    def _wait_for_others(self, home: int | None = None) -> None:
        """Leaves the step function until this rank has nothing else to do.

        Not where its stage has work left, for which other ranks wait: a value of an earlier stage was made
        before that.

        Args:
            home: the stage of the value that it waits for.

        Raises:
            TraceMismatchError: a later stage makes it, which waits for this one's work.
        """
        while not self._may_block:
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

    # ---- the end of the program ----

    def _leaves_program(self, *, on_path: bool = True) -> bool:
        """Whether code of the step function is behind the end of the program, which it may have come to now.

        Args:
            on_path: what it does is what the trace has next; the program ends where it is not, if no unit
                is left.
        """
        cursor = self._cursor
        if not self.is_behind_end and (cursor.is_at_end or (not on_path and not cursor.has_units_left)):
            self._end_program()
        return self.is_behind_end

    def _end_program(self) -> None:
        """What follows is run by every rank, as it is; takes what stages have sent for the rest before."""
        for instruction in self._cursor.rest:
            if isinstance(instruction.func, nn.Module):
                self._cursor.mismatch("nothing more")
            if instruction.place is Place.HERE:
                if instruction.stage != self.stage:
                    self._enter(instruction.stage)
                for _, value in instruction.flow.cuts:
                    self.tensors.leaf(value, instruction.stage)
        self._known.end_program()
        self.is_behind_end = True
        self._python_state = get_python_mark()

    def _operate_behind_end(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Executes an operation that is no part of the program, as every rank does."""
        if func in NEED_HISTORY:
            self._known.refuse_history(name_of_call(func), (args, kwargs))
        if func in OF_GRADIENT and not self._cursor.is_free(args[0]):
            refuse_gradient_inside_step()
        if self.reached_backward:
            refuse_gradient_of(func, args)
        args, kwargs = map_tree(self._known.here, (args, kwargs))
        generators = [item for item in flatten((args, kwargs))[0] if isinstance(item, torch.Generator)]
        with self._known.refusing_changes():
            return self._cursor.run_behind_end(func, args, kwargs, generators)

    def _take_loss_behind_end(self, loss: Tensor, gradient: Tensor | None) -> Tensor | None:
        """See `_take_loss`."""
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
        return gradient

    def _refuse_behind_end(self) -> None:
        """Refuses calls of modules behind the end of the program."""
        if not (self.is_behind_end or self._cursor.is_at_end):
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
            "or read them in another step function. Where the forward of the model reads one between its "
            "modules, move that and what follows into a module of its own, which is placed whole."
        )
