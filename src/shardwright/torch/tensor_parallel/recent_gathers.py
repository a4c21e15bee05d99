"""Keeps the tensors gathered last, for others that need them whole, too.

Where tensors between units are cut along the sequence, queries, keys and values of a layer each need all of
one norm's result, and so do their weights' gradients, one after the other. Two tensors are kept, so that
memory stays as small as the cut made it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwright.torch._private import StorageWeakRef, memory_of

__all__ = ["MOST_KEPT", "RecentGathers", "order_of"]

MOST_KEPT = 2


class RecentGathers:
    """Whole tensors by this rank's parts. They must not be written to."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], tuple[StorageWeakRef, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def knows(self, local: Tensor, spec: Any) -> bool:
        """Whether a tensor is at hand, or its transpose."""
        kept = self._kept.get(_key(local, spec))
        return kept is not None and not kept[0].expired()  # type: ignore[no-untyped-call]

    def whole(self, local: Tensor, spec: Any, gather: Callable[[], Tensor]) -> Tensor:
        """All elements of a tensor."""
        key, order = _key(local, spec), order_of(spec.shape, spec.strides)
        if not self.knows(local, spec):
            made = gather().permute(order)
            self._kept[key] = StorageWeakRef(_own(local).untyped_storage()), made  # type: ignore[no-untyped-call]
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key][1].permute([order.index(dim) for dim in range(len(order))])

    def written(self, memory: int) -> None:
        """Forgets what was gathered from memory that was written."""
        for key in [key for key in self._kept if key[0] == memory]:
            del self._kept[key]

    def clear(self) -> None:
        """Lets go of all."""
        self._kept.clear()


def order_of(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions from the widest stride to the narrowest: the same for a tensor and its transpose."""
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim]))


def _own(local: Tensor) -> Tensor:
    """What this rank has of a part that other ranks share, too."""
    return getattr(local, "_local", local)


def _key(local: Tensor, spec: Any) -> tuple[Any, ...]:
    order, own = order_of(spec.shape, spec.strides), _own(local)
    sizes = tuple([(spec.shape[dim], spec.strides[dim], own.stride(dim)) for dim in order])
    cut, inside = spec.placement, getattr(local, "_spec", None)
    return memory_of(own), own.storage_offset(), sizes, order.index(cut.dim), cut.runs, inside
