"""Supplies the tensors that step-function code reads to ranks that did not compute them.

A `ReadingStep` runs on every rank of a replica. What its trace covers is computed where the program says. Of
any other tensor that it touches, the rank that made it posts the value, and the other ranks fetch it::

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

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.comm.joining.store import ValueBoard
from shardwright.errors import TraceMismatchError
from shardwright.torch.execution.microbatches.microbatch_tensors import MicrobatchTensors
from shardwright.torch.execution.microbatches.program_cursor import ProgramCursor
from shardwright.torch.execution.microbatches.value_bundles import OwnValues, TakenValues
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import leaves


class KnownValues:
    """The values of other ranks' tensors that one microbatch knows.

    Attributes:
        is_behind_end: the program has ended for this microbatch: every rank runs what follows.
    """

    def __init__(
        self,
        index: int,
        program: Program,
        cursor: ProgramCursor,
        tensors: MicrobatchTensors,
        board: ValueBoard,
        wait: Callable[[int], None],
        device: torch.device,
    ):
        self.is_behind_end = False
        self._index = index
        self._program = program
        self._cursor = cursor
        self._tensors = tensors
        self._wait = wait
        self._device = device
        self._known: dict[int, Tensor] = {}
        self._in_shared_memory: frozenset[int | None] = frozenset()
        self._changes: Counter[int] = Counter()  # how often the program has changed a value so far
        # Not the rank of the loss: the backward of each microbatch begins there, before others wait for it.
        self._may_block = len(program.stages) > 1 and program.loss_stage not in program.stages
        self._own_values = OwnValues(index, program, board, self._changes)
        self._taken_values = TakenValues(index, program, board, self._changes)

    def clear(self) -> None:
        self._known.clear()
        self._own_values.clear()
        self._taken_values.clear()

    # ---- what was made here ----

    def note(self, result: Any) -> None:
        """Records the values that step-function code gets to see."""
        for item in leaves(result):
            value = self.value_of(item)
            if value is not None and not isinstance(item, DeferredTensor):
                self._own_values.note(value, item)

    def before_change(self, values: Collection[int]) -> None:
        """Posts values that a step changes in place, here or on another rank, as they are before."""
        self._own_values.before_change(values)
        self._changes.update(values)

    def before_pause(self) -> None:
        """Posts what another rank may have to read before the step function goes on."""
        self._own_values.put_up_small()
        if self._may_block:
            self._own_values.put_up_large()

    def pass_backward(self) -> None:
        """Posts the rest at ``backward``, or at an end without: nobody waits for more of before."""
        self._own_values.pass_backward()

    def end_program(self) -> None:
        """Posts what was made so far: every rank runs what follows."""
        self._own_values.put_up_small()
        self._in_shared_memory = self._program.trace.in_shared_memory
        self.is_behind_end = True

    def value_of(self, item: Any) -> int | None:
        """The value that a tensor stands for, or that it is on the rank that made it; None for others."""
        if isinstance(item, DeferredTensor):
            return item.value
        return self._cursor.value_of(item)

    # ---- what others made ----

    def here(self, item: Any) -> Any:
        """The same tensor as this rank computes with it; anything else as it is."""
        value = self.value_of(item)
        if value is None:
            self._cursor.refuse_placed(item)
            return item
        if value in self._program.displaced and self._changes[value]:
            raise TraceMismatchError(
                f"{user_line()}: the step function reads a tensor, or uses it behind a read, that one stage "
                "has made and another changed in place, so that no rank has it in the variable. Use a "
                "clone() of it, made before."
            )
        if value not in self._known:
            found = self._find(value, item)
            if not self.is_behind_end:
                return found  # it may be changed before it is read again
            self._known[value] = found
        return self._known[value]

    def refuse_history(self, name: str, arguments: Any) -> None:
        """Refuses a call that needs the history of a tensor that stages have made."""
        if any(self.value_of(item) is not None for item in leaves(arguments)):
            raise TraceMismatchError(
                f"{user_line()}: {name} is called behind a value that the step function has read, for a "
                "tensor whose autograd history only one rank has. Call it before anything is read."
            )

    @contextmanager
    def refusing_changes(self) -> Iterator[None]:
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

    def returned(self, item: Any) -> Any:
        """The step function's results, as far as this rank knows them."""
        value = self.value_of(item)
        return item if value is None else self._known.get(value, item)

    def _find(self, value: int, item: Tensor) -> Tensor:
        leaf = self._received(value) if self.is_behind_end else None
        if not isinstance(item, DeferredTensor):
            self._own_values.put_up(value, item)
            return self._own(value, item) if leaf is None else leaf
        if leaf is not None:
            return leaf
        self._own_values.put_up_small()
        self._wait(self._program.home_of[value])
        behind = self._own_values.is_behind_backward
        return self._unpacked(value, self._taken_values.take(value, is_behind_backward=behind))

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
        if not self.is_behind_end:
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
