"""Where a microbatch leaves its program, and how it compares with the trace."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.errors import TraceError, TraceMismatchError, UsageError
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatches.known_values import KnownValues
from shardwright.torch.execution.microbatches.microbatch_tensors import MicrobatchTensors
from shardwright.torch.execution.microbatches.program_cursor import ProgramCursor
from shardwright.torch.interception.backward_calls import (
    refuse_gradient_of,
    refuse_second_backward,
    refuse_several_numbers,
    refuse_untrained,
)
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.glue import refuse_gradient_inside_step
from shardwright.torch.program.instructions import Instruction, Place
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.functions import NEED_HISTORY, OF_GRADIENT, name_of_call
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import flatten, map_tree
from shardwright.torch.randomness import get_python_mark


class TraceComparison:
    """Compares the stand-ins of a microbatch with those of the trace."""

    def __init__(self, index: int, program: Program):
        self._index = index
        self._program = program

    def arguments(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses another argument of a step than in the trace."""
        step = instruction.step
        items: Sequence[Any] = args if step.flat else flatten((args, kwargs))[0]
        for position, expected, elsewhere in instruction.expects:
            item = items[position] if position < len(items) else None
            if item.value != expected if type(item) is DeferredTensor else elsewhere:
                self._refuse(f"{name_of_call(step.func)} gets", step.line)

    def loss(self, loss: Any) -> None:
        """Refuses another loss; raises as `arguments` does."""
        self._compare(loss, self._program.trace.graph.loss, "the loss")

    def result(self, result: Any) -> None:
        """Refuses other tensors in what the step function returns; raises as `arguments` does."""
        items = flatten(result)[0] if self._program.trace.result_values else []
        for position, value in self._program.trace.result_values:
            self._compare(items[position] if position < len(items) else None, value, "the result")

    def _compare(self, item: Any, value: int | None, what: str) -> None:
        expected = None if value is None else self._program.trace.tensors.stand_ins[value]
        if expected is not None and type(item) is DeferredTensor and item.value != expected:
            self._refuse(f"{what} is", "")

    def _refuse(self, what: str, line: str) -> NoReturn:
        raise TraceMismatchError(
            f"{line or user_line()}: {what} another tensor in microbatch {self._index} than in the trace, by "
            "which ranks send each other what they need. What is chosen among tensors must be the same for "
            "every batch, or follow from the arguments of the step function: pass what decides it to the "
            "step function as an argument, or put the choice inside one module."
        )


class ProgramEnd:
    """Finds where one microbatch leaves its program, and runs what follows.

    The trace of a `ReadingStep` ends where it reads a value, or does what it may do by a value; so does the
    program. What follows, every rank runs as it is, with values that others have put up (`KnownValues`)::

        output = model(batch)          program: each rank runs its stages
        loss = criterion(output)       program: on the rank of the last stage
        if loss.item() > 10: ...       behind its end: on every rank
    """

    def __init__(
        self,
        program: Program,
        cursor: ProgramCursor,
        tensors: MicrobatchTensors,
        known: KnownValues,
        enter: Callable[[int], None],
    ):
        self._program = program
        self._cursor = cursor
        self._tensors = tensors
        self._known = known
        self._enter = enter
        self._python_mark: Any = None  # of the random numbers of Python, where every rank goes on

    @property
    def is_passed(self) -> bool:
        """Whether the step function has left the program."""
        return self._known.is_behind_end

    def passes(self, *, on_path: bool = True) -> bool:
        """Whether code of the step function is behind the end, which it may have come to now."""
        cursor = self._cursor
        if not self.is_passed and (cursor.is_at_end or (not on_path and not cursor.has_units_left)):
            self._pass()
        return self.is_passed

    def _pass(self) -> None:
        """Leaves the program to every rank's own code; takes what stages have sent for its rest before."""
        for instruction in self._cursor.rest:
            if isinstance(instruction.step.func, nn.Module):
                self._cursor.mismatch("nothing more")
            if instruction.place is Place.HERE:
                self._enter(instruction.stage)
                for _, value in instruction.flow.cuts:
                    self._tensors.leaf(value, instruction.stage)
        self._known.end_program()
        self._python_mark = get_python_mark()

    # ---- behind it ----

    @contextmanager
    def refusing_draws(self) -> Iterator[None]:
        """Refuses random numbers of Python behind the end: ranks would draw different ones."""
        if self.is_passed:
            self._python_mark = get_python_mark()
        yield
        if self.is_passed and get_python_mark() != self._python_mark:
            self._cursor.refuse_draws()

    def run(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        behind_backward: bool,
    ) -> Any:
        """Executes an operation that is no part of the program, as every rank does."""
        if func in NEED_HISTORY:
            self._known.refuse_history(name_of_call(func), (args, kwargs))
        if func in OF_GRADIENT and not self._cursor.is_free(args[0]):
            refuse_gradient_inside_step()
        if behind_backward:
            refuse_gradient_of(func, args)
        args, kwargs = map_tree(self._known.here, (args, kwargs))
        generators = [item for item in flatten((args, kwargs))[0] if isinstance(item, torch.Generator)]
        with self._known.refusing_changes():
            return self._cursor.run_behind_end(func, args, kwargs, generators)

    def take_loss(
        self, loss: Tensor, gradient: Tensor | None, *, behind_backward: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The loss given to ``backward``, and its gradient, as this rank has them; no loss on other ranks."""
        refuse_second_backward(behind_backward)
        refuse_several_numbers(loss, gradient)
        if self._program.loss_stage is None:
            raise TraceError(
                f"{user_line()}: backward is called, but what the model returned does not depend on any "
                "trained parameter, so there is nothing to train. Do not call the model under no_grad()."
            )
        if self._program.loss_stage not in self._program.stages:
            return None, gradient
        loss = self._known.here(loss)
        refuse_untrained(loss.requires_grad)
        return loss, self._known.here(gradient)

    def returned(self, result: Any, loss: Tensor | None, *, trains: bool) -> Returned:
        """The return value of the step function, as this rank knows it."""
        items, structure = flatten(result)
        valued = [(place, self._known.value_of(item)) for place, item in enumerate(items)]
        return Returned(
            result=structure.rebuild([self._known.returned(item) for item in items]),
            values=tuple((place, value) for place, value in valued if value is not None),
            loss_at=next((at for at, item in enumerate(items) if item is loss and loss is not None), None),
            trains=trains,
            behind_end=True,
        )

    def refuse_model(self, *, behind_backward: bool) -> None:
        """Refuses calls of the model, and of modules in it, behind the end."""
        if not (self.is_passed or self._cursor.is_at_end):
            return
        if behind_backward:
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
