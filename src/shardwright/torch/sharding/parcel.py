"""A parcel: sharded parameters gathered and released together, and kept out of what autograd saves.

Autograd would keep all rows of each parameter that a forward uses. It gets a reference to them instead, and
the backward gathers the rows again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch._private.tensors import has_storage, outside_of_functions, storage_key
from shardwright.torch.pytorch.tensors import KeptTensor
from shardwright.torch.sharding.shard_memory import ShardMemory, Wait
from shardwright.torch.sharding.sharded_parameter import AbsentParameter, Bring, ShardedParameter

# Elements that are gathered together: what comes later can be on its way while these are used.
_SIZE = 2**20


class Parcel:
    """Parameters whose rows are gathered together."""

    def __init__(self, parameters: Sequence[ShardedParameter], memory: ShardMemory):
        self.parameters = parameters
        self.memory = memory
        self.size = memory.layout.whole_size
        self._wait: Wait | None = None
        self._are_here = False

    @property
    def is_here(self) -> bool:
        """All rows are there."""
        return self._are_here

    def begin(self, bring: Bring) -> None:
        """Starts a step; rows that need gathering are absent."""
        self._are_here = not self.memory.gathers
        for each in self.parameters:
            each.begin(None if self._are_here else bring)

    def gather(self) -> None:
        """Starts to bring all rows together; see `ShardMemory.gather`."""
        self._wait = self.memory.gather()

    def arrive(self) -> None:
        """Waits until all rows are there."""
        if self._are_here:
            return
        self.settle()
        self._are_here = True
        for index, each in enumerate(self.parameters):
            each.come(self.memory.whole(index))

    def go(self, bring: Bring) -> None:
        """Releases all rows, in a step."""
        self.settle()
        if self._are_here:
            self._are_here = False
            for each in self.parameters:
                each.go(bring)
        self.memory.release()

    def end(self) -> None:
        """Releases all rows when the step has ended."""
        self._are_here = False
        for each in self.parameters:
            each.forget_rows()
        self.memory.release()

    def leave(self) -> None:
        """Waits for nothing any more: a step has failed in its middle."""
        self._wait = None

    def settle(self) -> None:
        """Waits for rows on their way."""
        if self._wait is not None:
            self._wait()
            self._wait = None


def parcels_of(parameters: Mapping[str, nn.Parameter], *, most: int) -> list[list[str]]:
    """Names of parameters of one type that follow one another."""
    found: list[list[str]] = []
    size, dtype = 0, None
    for name, parameter in parameters.items():
        if not found or parameter.dtype != dtype or size + parameter.numel() > min(_SIZE, most):
            found.append([])
            size, dtype = 0, parameter.dtype
        found[-1].append(name)
        size += parameter.numel()
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a saved tensor among rows that were gathered together."""

    step: int
    number: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedRows:
    """Replaces gathered rows in what autograd saves.

    Attributes:
        keeps_tensors: all other tensors are kept as they are (`KeptTensor`): see `StageOffload`.
    """

    keeps_tensors = True

    def __init__(self, bring: Callable[[int], Tensor], bring_all: Bring):
        self._bring = bring
        self._bring_all = bring_all
        self._numbers: dict[int, int] = {}
        self._step = 0

    def come(self, number: int, memory: Tensor) -> None:
        """Rows are in this memory, until they go."""
        self._numbers[storage_key(memory)] = number

    def go(self, memory: Tensor) -> None:
        """They are not found there any more."""
        self._numbers.pop(storage_key(memory), None)

    def end(self) -> None:
        """A step has ended: none are found anywhere any more."""
        self._numbers.clear()
        self._step += 1

    def in_force(self) -> AbstractContextManager[Any]:
        """A context in which operations save places instead of rows."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Place | KeptTensor:
        with outside_of_functions():  # code between units is watched
            return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> _Place | KeptTensor:
        if isinstance(tensor, AbsentParameter):  # a checkpoint saves its arguments
            self._bring_all([tensor])
        number = self._number_of(tensor)
        if number is not None:
            offset = int(tensor.storage_offset())
            return _Place(self._step, number, tensor.dtype, tensor.shape, tensor.stride(), offset)
        return KeptTensor(tensor)

    def _number_of(self, tensor: Tensor) -> int | None:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and has_storage(tensor)
        if not plain or tensor.is_conj() or tensor.is_neg():
            return None  # it is kept as it is
        return self._numbers.get(storage_key(tensor))

    def _unpack(self, packed: _Place | KeptTensor) -> Tensor:
        with outside_of_functions():
            return self._unpacked(packed)

    def _unpacked(self, packed: _Place | KeptTensor) -> Tensor:
        if isinstance(packed, _Place):
            if packed.step != self._step:
                raise UsageError(
                    f"a backward goes through what another step has computed, with a parameter of "
                    f"{packed.shape.numel()} elements that has changed since. Call it in the step that "
                    "computes it, or raise sdp_max_live_parameters."
                )
            memory = self._bring(packed.number)
            return memory.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)
        return packed.get()
