"""The model tensors of a checkpoint, in the form that another library gets."""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.checkpoint.boxes import Box, boxes_of_range
from shardwright.checkpoint.float_types import FLOATS, converted
from shardwright.checkpoint.model_names import MODEL, in_order, without_prefix
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.checkpoint.tensor_file import ITEM_BYTES, TensorSource
from shardwright.errors import CheckpointError

__all__ = ["TIES", "ModelTensors"]

TIES = "ties.json"
"""The file with the other names of tensors that have several: each with the name that is saved."""

# Bytes that are put together at a time: whatever the size of a tensor, not more is in memory.
_CHUNK = 8 * 2**20


class ModelTensors:
    """The model tensors of a checkpoint, whole, whatever layout saved them.

    Attributes:
        sources: the tensors by name, in order; nothing is read before it is asked for.
        overflowed: by name, how many numbers were finite and have become infinite, in what was read so far.
    """

    def __init__(
        self, saved: SavedCheckpoint, *, prefix: str = "", dtype: str | None = None, ties: bool = False
    ):
        names = [name for name in saved.index.tensors if name.startswith(MODEL)]
        if not names:
            raise CheckpointError(f"{saved.path} has no tensors of a model.")
        bare = without_prefix(names, MODEL, where=str(saved.path))
        others = _other_names(saved, set(bare.values())) if ties else {}
        wanted = without_prefix([*bare.values(), *others], prefix, where=str(saved.path))
        self._saved = saved
        self.overflowed: dict[str, int] = {}
        own = {name: self._source(wanted[name], f"{MODEL}{name}", dtype) for name in bare.values()}
        self.sources: Mapping[str, TensorSource] = {
            wanted[name]: own[others.get(name, name)] for name in in_order(wanted)
        }

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources.values())

    def _source(self, name: str, full: str, dtype: str | None) -> TensorSource:
        entry = self._saved.entry(full)
        target = dtype if dtype is not None and entry.dtype in FLOATS else entry.dtype
        return TensorSource(target, entry.shape, partial(self._read, name, full, target))

    def _read(self, name: str, full: str, target: str) -> Iterator[memoryview]:
        entry = self._saved.entry(full)
        numel, most = prod(entry.shape), _CHUNK // ITEM_BYTES[entry.dtype]
        for start in range(0, numel, most):
            for box in boxes_of_range(entry.shape, start, min(start + most, numel)):
                items = self._items(full, box).data.cast("B")
                if target == entry.dtype:
                    yield items
                    continue
                made = converted(items, source=entry.dtype, target=target)
                if made.num_overflowed:
                    self.overflowed[name] = self.overflowed.get(name, 0) + made.num_overflowed
                yield memoryview(made.data)

    def _items(self, full: str, box: Box) -> NDArray[np.uint8]:
        """The bytes of a part of a tensor, in row-major order."""
        item_bytes = ITEM_BYTES[self._saved.entry(full).dtype]
        made = np.empty((*box.shape, item_bytes), np.uint8)
        for overlap in self._saved.overlaps(full, box):
            piece = np.frombuffer(overlap.stored.data, np.uint8).reshape(*overlap.stored.shape, item_bytes)
            made[overlap.target.slices] = piece[overlap.source.slices]
        return made


def _other_names(saved: SavedCheckpoint, names: set[str]) -> dict[str, str]:
    """The names of tied tensors that are not saved, each with the one that is."""
    found = saved.document(TIES) if TIES in saved.manifest.files else {}
    if not isinstance(found, dict) or not names.issuperset(map(str, found.values())):
        raise CheckpointError(f"{saved.path / TIES} has names of tensors that are not there.")
    return found
