"""The memory of tensors, and what is stored in it."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["StorageWeakRef", "has_storage", "memory_of", "storage_key", "values_of_sparse", "weak_storage"]


def memory_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor, while it lives; unlike the address, that of an empty one, too."""
    return int(tensor.untyped_storage()._cdata)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether it has memory that other tensors may share: not those of `torch.func` (vmap, grad)."""
    return tensor.layout is torch.strided and bool(torch._C._has_storage(tensor))


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, also for fake ones."""
    if tensor.layout is not torch.strided:
        return id(tensor)  # sparse tensors have no memory of their own to share
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)  # what `torch.func.vmap` hands to the function that it maps


def weak_storage(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors that share memory, and stays theirs alone; None for those without."""
    if not has_storage(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def values_of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """The stored entries of a sparse tensor, uncoalesced; `values()` insists that they are summed first."""
    values: torch.Tensor = tensor._values()
    return values
