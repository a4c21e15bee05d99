"""Where a microbatch leaves its program, and what its code reads of other ranks from then on, and before.

The trace of a `ReadingStep` ends where it reads a value, or does what it may do by a value; so does the
program. What follows, every rank runs as it is::

    output = model(batch)          program: each rank runs its stages
    loss = criterion(output)       program: on the rank of the last stage
    if loss.item() > 10: ...       behind its end: on every rank

What the trace covers is computed where the program says. Of any other tensor that code touches, the rank that
made it posts the value, and the other ranks fetch it::

    rank 1, which has the loss                rank 0
    loss.item()   puts it up, goes on         loss.item()   leaves the microbatch, until nothing else is left
    loss * 2      on every rank               loss * 2      to do but its backward; then takes it

Small tensors are posted where the program ends, whether or not a rank asks for them, so that one rank may
read them alone (``if smp.rank() == 0: print(loss.item())``). A large tensor is posted only when the rank that
made it uses it.

Where a rank has several stages, it and another rank may each wait for a value of the other. So a rank that
leaves a microbatch posts large tensors too, without knowing whether another rank will ask::

    rank 0    stage 0 of microbatch 0, leaves it ── stage 0 of 1 ── stage 3 of 0: waits for rank 2
    rank 2    ... stage 5 of microbatch 0 ── reads what stage 0 has made: waits for rank 0
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.comm.joining.store import ValueBoard
from shardwright.errors import TraceError, TraceMismatchError, UsageError
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatches.cursor import Cursor
from shardwright.torch.execution.microbatches.microbatch_tensors import MicrobatchTensors
from shardwright.torch.execution.microbatches.value_bundles import PostedValues
from shardwright.torch.interception.backward_calls import (
    refuse_gradient_of,
    refuse_second_backward,
    refuse_several_numbers,
    refuse_untrained,
)
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.glue import plain_torch, refuse_gradient_inside_step
from shardwright.torch.program.instructions import Place
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.functions import NEED_HISTORY, OF_GRADIENT, name_of_call
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import flatten, leaves, map_tree
from shardwright.torch.randomness import get_python_mark, get_state, same_state


class ProgramEnd:
    """Finds where one microbatch leaves its program, and runs what follows, with the values that it reads.

    Attributes:
        posted: what ranks put up for each other.
    """

    def __init__(
        self,
        index: int,
        program: Program,
        cursor: Cursor,
        tensors: MicrobatchTensors,
        board: ValueBoard,
        device: torch.device,
    ):
        self._program = program
        self._cursor = cursor
        self._tensors = tensors
        self._device = device
        self._known: dict[int, Tensor] = {}
        self._in_shared_memory: frozenset[int | None] = frozenset()
        self._python_mark: Any = None  # of the random numbers of Python, where every rank goes on
        # Not the rank of the loss: the backward of each microbatch begins there, before others wait for it.
        self._may_block = len(program.stages) > 1 and program.loss_stage not in program.stages
        self.posted = PostedValues(index, program, board)

    def clear(self) -> None:
        self._known.clear()
        self.posted.clear()

    def passes(self, *, on_path: bool = True) -> bool:
        """Whether code of the step function is behind the end, which it may have come to now."""
        cursor = self._cursor
        if not cursor.behind_end and (cursor.is_at_end or (not on_path and not cursor.has_units_left)):
            self._pass()
        return cursor.behind_end

    def _pass(self) -> None:
        """Leaves the program to every rank's own code; takes what stages have sent for its rest before."""
        for instruction in self._cursor.rest:
            if isinstance(instruction.step.func, nn.Module):
                self._cursor.mismatch("nothing more")
            if instruction.place is Place.HERE:
                self._cursor.enter(instruction.stage)
                for _, value in instruction.flow.cuts:
                    self._tensors.leaf(value, instruction.stage)
        self.posted.put_up_small()
        self._in_shared_memory = self._program.trace.in_shared_memory
        self._cursor.behind_end = True
        self._python_mark = get_python_mark()

    # ---- what was made here ----

    def note(self, result: Any) -> None:
        """Records the values that step-function code gets to see."""
        for item in leaves(result):
            value = self.value_of(item)
            if value is not None and not isinstance(item, DeferredTensor):
                self.posted.note(value, item)

    def before_pause(self) -> None:
        """Posts what another rank may have to read before the step function goes on."""
        self.posted.put_up_small()
        if self._may_block:
            self.posted.put_up_large()

    def value_of(self, item: Any) -> int | None:
        """The value that a tensor stands for, or that it is on the rank that made it; None for others."""
        if isinstance(item, DeferredTensor):
            return item.value
        return self._cursor.value_of(item)

    # ---- behind the end ----

    @contextmanager
    def refusing_draws(self) -> Iterator[None]:
        """Refuses random numbers of Python behind the end: ranks would draw different ones."""
        if self._cursor.behind_end:
            self._python_mark = get_python_mark()
        yield
        if self._cursor.behind_end and get_python_mark() != self._python_mark:
            self._refuse_draws()

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes an operation that is no part of the program, as every rank does."""
        if func in NEED_HISTORY:
            self._refuse_history(name_of_call(func), (args, kwargs))
        if func in OF_GRADIENT and not self._cursor.is_free(args[0]):
            refuse_gradient_inside_step()
        if self._cursor.behind_backward:
            refuse_gradient_of(func, args)
        args, kwargs = map_tree(self.here, (args, kwargs))
        generators = [item for item in flatten((args, kwargs))[0] if isinstance(item, torch.Generator)]
        before = get_state(self._device, tuple(generators))
        with self._refusing_changes():
            result = func(*args, **kwargs)
        if not same_state(get_state(self._device, tuple(generators)), before):
            self._refuse_draws()
        return result

    def _refuse_draws(self) -> NoReturn:
        """Refuses random numbers behind the end of a program: ranks would draw different ones."""
        raise TraceMismatchError(
            f"{user_line()}: the step function draws random numbers behind backward(), or behind a value "
            "that it has read, where ranks would draw different ones. Draw before anything is read, or "
            "before the step function, and pass them to it."
        )

    def take_loss(self, loss: Tensor, gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The loss given to ``backward``, and its gradient, as this rank has them; no loss on other ranks."""
        refuse_second_backward(self._cursor.behind_backward)
        refuse_several_numbers(loss, gradient)
        if self._program.loss_stage is None:
            raise TraceError(
                f"{user_line()}: backward is called, but what the model returned does not depend on any "
                "trained parameter, so there is nothing to train. Do not call the model under no_grad()."
            )
        if self._program.loss_stage not in self._program.stages:
            return None, gradient
        loss = self.here(loss)
        refuse_untrained(loss.requires_grad)
        return loss, self.here(gradient)

    def returned(self, result: Any, loss: Tensor | None) -> Returned:
        """The return value of the step function, as this rank knows it."""
        items, structure = flatten(result)
        valued = [(place, self.value_of(item)) for place, item in enumerate(items)]
        return Returned(
            result=structure.rebuild([self.as_known(item) for item in items]),
            values=tuple((place, value) for place, value in valued if value is not None),
            loss_at=next((at for at, item in enumerate(items) if item is loss and loss is not None), None),
            trains=self._cursor.behind_backward,
            behind_end=True,
        )

    def refuse_model(self) -> None:
        """Refuses calls of the model, and of modules in it, behind the end."""
        if not (self._cursor.behind_end or self._cursor.is_at_end):
            return
        if self._cursor.behind_backward:
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

    # ---- what others made ----

    def here(self, item: Any) -> Any:
        """The same tensor as this rank computes with it; anything else as it is."""
        value = self.value_of(item)
        if value is None:
            self._refuse_placed(item)
            return item
        if value in self._program.displaced and self.posted.changes[value]:
            raise TraceMismatchError(
                f"{user_line()}: the step function reads a tensor, or uses it behind a read, that one stage "
                "has made and another changed in place, so that no rank has it in the variable. Use a "
                "clone() of it, made before."
            )
        if value not in self._known:
            found = self._find(value, item)
            if not self._cursor.behind_end:
                return found  # it may be changed before it is read again
            self._known[value] = found
        return self._known[value]

    def _refuse_placed(self, item: Any) -> None:
        """Refuses a tensor that not every rank has, and that is no value."""
        is_spoilt = self._cursor.is_spoilt(item)
        if is_spoilt or not self._cursor.is_free(item):
            what = "a tensor that a module has changed in place" if is_spoilt else "a parameter"
            line = self._program.trace.end.line
            raise TraceMismatchError(
                f"{user_line()}: {what} is used by the step function, behind a value that was read"
                f"{f' ({line})' if line else ''}. Only one rank has it. Compute what you need of it before "
                "anything is read, or put this code into a module inside the model, which is then one unit. "
                "Sizes that follow from values (bincount, unique, a boolean mask) are read, too."
            )

    def _refuse_history(self, name: str, arguments: Any) -> None:
        """Refuses a call that needs the history of a tensor that stages have made."""
        if any(self.value_of(item) is not None for item in leaves(arguments)):
            raise TraceMismatchError(
                f"{user_line()}: {name} is called behind a value that the step function has read, for a "
                "tensor whose autograd history only one rank has. Call it before anything is read."
            )

    @contextmanager
    def _refusing_changes(self) -> Iterator[None]:
        """Refuses a change in place of what has other names: other ranks have a copy for each of them."""
        shared = [
            (tensor, tensor._version)
            for value, tensor in self._known.items()
            if value in self._in_shared_memory
        ]
        yield
        if any(tensor._version != version for tensor, version in shared):
            raise TraceMismatchError(
                f"{user_line()}: a tensor is changed in place that shares memory with another one which the "
                "step function has (a view of it, or detach()), behind a value that was read, or to be read. "
                "Only the rank that has made them would change both. Write x = x + y in place of x += y, or "
                "change a clone()."
            )

    def as_known(self, item: Any) -> Any:
        """The step function's results, as far as this rank knows them."""
        value = self.value_of(item)
        return item if value is None else self._known.get(value, item)

    def _find(self, value: int, item: Tensor) -> Tensor:
        leaf = self._received(value) if self._cursor.behind_end else None
        if not isinstance(item, DeferredTensor):
            self.posted.put_up(value, item)
            return self._own(value, item) if leaf is None else leaf
        if leaf is not None:
            return leaf
        self.posted.put_up_small()
        self._cursor.wait_for_others(self._program.home_of[value])
        return self._unpacked(value, self.posted.take(value))

    def _received(self, value: int) -> Tensor | None:
        """On the rank that computes the loss: the received tensor, with a way back for its gradient."""
        stage, home = self._program.loss_stage, self._program.home_of[value]
        if stage is None or stage == home or stage not in self._program.stages:
            return None
        leaf = self._tensors.leaves.get((value, stage))
        with torch.enable_grad():  # also where no_grad() is in force: it may be used again
            return None if leaf is None else leaf.clone()

    def _own(self, value: int, item: Tensor) -> Tensor:
        """A tensor of this rank; the backward of the loss must not go on into another stage by itself."""
        if not self._cursor.behind_end:
            return item
        stage = self._program.loss_stage
        elsewhere = stage in self._program.stages and stage != self._program.home_of[value]
        if elsewhere and item.requires_grad:
            return _without_way_back(item.detach())
        # Another object: what gives it back as it is (x.float()) gives none of the program, as on all ranks.
        with torch.enable_grad():  # also where no_grad() is in force: it may be used again
            if value in self._tensors.values:  # what is sent must stay as it is
                return item.clone()
            alias: Tensor = torch.ops.aten.alias(item)
            return alias

    def _unpacked(self, value: int, packed: bytes) -> Tensor:
        spec = self._program.trace.graph.values[value].spec
        dtype = getattr(torch, spec.dtype)
        buffer = torch.frombuffer(bytearray(packed), dtype=dtype) if packed else torch.empty(0, dtype=dtype)
        tensor = buffer.view(spec.shape).to(self._device)
        if not spec.requires_grad:
            return tensor
        # The code may change it in place. Of the rank that has the loss, only what came in has a way back.
        if self._program.loss_stage in self._program.stages:
            return _without_way_back(tensor)
        with torch.enable_grad():
            return tensor.requires_grad_().clone()


class _WithoutWayBack(torch.autograd.Function):
    """A tensor whose gradient would have to go to another rank, which does not expect one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.line = user_line()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> NoReturn:
        raise TraceMismatchError(
            f"{ctx.line}: the loss is computed of a tensor that another stage has made, behind a value that "
            "the step function has read, and its gradient cannot go back there. Compute the loss before "
            "anything is read, or detach() the tensor."
        )


def _without_way_back(tensor: Tensor) -> Tensor:
    with torch.enable_grad(), plain_torch():
        made: Tensor = _WithoutWayBack.apply(tensor.requires_grad_())  # type: ignore[no-untyped-call]
        return made
