"""Takes each pending sum once, for all that see its memory.

The gradient of a linear layer's output is used twice, under two views: for the weight, and for the input.
Both need its sum over the ranks. So the sum of a whole stretch of memory is kept as long as that lives, until
someone writes there.
"""

from collections.abc import Callable

from torch import Tensor

from shardwright.torch._private import StorageWeakRef, memory_of

__all__ = ["PendingSums"]


class PendingSums:
    """The sums already taken of one rank's partial sums."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def knows(self, local: Tensor) -> bool:
        """Whether the sum of this partial sum was taken, and still holds."""
        kept = self._kept.get(memory_of(local))
        if kept is None or local.numel() != kept[1].numel() or local.dtype != kept[1].dtype:
            return False
        return not _is_gone(kept[0])

    def known(self, local: Tensor) -> Tensor | None:
        """The sum over the ranks of a partial sum, if it was taken, and still holds."""
        return _as(self._kept[memory_of(local)][1], local) if self.knows(local) else None

    def total(self, local: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum over the ranks of a partial sum."""
        storage = local.untyped_storage()
        if local.numel() * local.element_size() != storage.nbytes() or not local.numel():
            return summed(local)
        known = self.known(local)
        if known is not None:
            return known
        self.forget_dead()
        total = summed(local.as_strided((local.numel(),), (1,), 0))
        self._kept[memory_of(local)] = StorageWeakRef(storage), total  # type: ignore[no-untyped-call]
        return _as(total, local)

    def written(self, memory: int) -> None:
        """Forgets the sum of memory that was written."""
        self._kept.pop(memory, None)

    def forget_dead(self) -> None:
        """Lets go of the sums whose summands are gone."""
        for memory in [memory for memory, (storage, _) in self._kept.items() if _is_gone(storage)]:
            del self._kept[memory]


def _as(total: Tensor, local: Tensor) -> Tensor:
    return total.as_strided(local.shape, local.stride(), local.storage_offset())


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]
