"""What autograd saves for the backward of parameters whose rows come and go.

Autograd would keep all rows of each parameter that a forward has used. In their place it is given where they
are to be found; the backward brings them again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.torch._private import has_storage, storage_key, without_torch_functions

__all__ = ["SavedRows"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a saved tensor is found among rows that were gathered together."""

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
    """Sees to what autograd saves.

    Args:
        bring: has the rows with this number at hand, and returns their memory.
    """

    def __init__(self, bring: Callable[[int], Tensor]):
        self._bring = bring
        self._numbers: dict[int, int] = {}

    def come(self, number: int, memory: Tensor) -> None:
        """Rows are in this memory, until they go."""
        self._numbers[storage_key(memory)] = number

    def go(self, memory: Tensor) -> None:
        """They are not found there any more."""
        self._numbers.pop(storage_key(memory), None)

    def clear(self) -> None:
        """None are found anywhere any more."""
        self._numbers.clear()

    def in_force(self) -> AbstractContextManager[Any]:
        """A context in which operations save places instead of rows."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Place | _Kept | Tensor:
        with without_torch_functions():  # code between units is watched
            return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> _Place | _Kept | Tensor:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not has_storage(tensor):
            return tensor.detach()
        number = self._numbers.get(storage_key(tensor))
        if number is not None:
            return _Place(number, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        # A tensor with its history would keep itself alive.
        return _Kept(tensor.detach(), 0 if tensor.is_inference() else tensor._version)

    def _unpack(self, packed: _Place | _Kept | Tensor) -> Tensor:
        with without_torch_functions():
            return self._unpacked(packed)

    def _unpacked(self, packed: _Place | _Kept | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _Place):
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
