"""Keeps gathered rows out of what autograd saves for the backward.

Autograd would keep all rows of each parameter that a forward uses. It gets a reference to them instead, and
the backward gathers the rows again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch._private import has_storage, outside_of_functions, storage_key
from shardwright.torch.sharding.absent_parameter import AbsentParameter, Bring

__all__ = ["SavedRows"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a saved tensor is found among rows that were gathered together."""

    step: int
    number: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """Any other tensor; it must not be changed in place before the backward, as without this."""

    tensor: Tensor
    version: int


class SavedRows:
    """Replaces gathered rows in what autograd saves.

    Args:
        bring: has the rows with this number at hand, and returns their memory.
        bring_all: has the rows of parameters at hand.
    """

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

    def _pack(self, tensor: Tensor) -> _Place | _Kept:
        with outside_of_functions():  # code between units is watched
            return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> _Place | _Kept:
        if isinstance(tensor, AbsentParameter):  # a checkpoint saves its arguments
            self._bring_all([tensor])
        number = self._number_of(tensor)
        if number is not None:
            offset = int(tensor.storage_offset())
            return _Place(self._step, number, tensor.dtype, tensor.shape, tensor.stride(), offset)
        # A tensor with its history would keep itself alive.
        return _Kept(tensor.detach(), 0 if tensor.is_inference() else tensor._version)

    def _number_of(self, tensor: Tensor) -> int | None:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and has_storage(tensor)
        if not plain or tensor.is_conj() or tensor.is_neg():
            return None  # it is kept as it is
        return self._numbers.get(storage_key(tensor))

    def _unpack(self, packed: _Place | _Kept) -> Tensor:
        with outside_of_functions():
            return self._unpacked(packed)

    def _unpacked(self, packed: _Place | _Kept) -> Tensor:
        if isinstance(packed, _Place):
            if packed.step != self._step:
                raise UsageError(
                    f"a backward goes through what another step has computed, with a parameter of "
                    f"{packed.shape.numel()} elements that has changed since. Call it in the step that "
                    "computes it, or raise sdp_max_live_parameters."
                )
            memory = self._bring(packed.number)
            return memory.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)
        tensor = packed.tensor
        if not tensor.is_inference() and tensor._version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} is at version "
                f"{tensor._version}; expected version {packed.version} instead."
            )
        return tensor
