"""Small checkpoints for tests."""

import array
import os
from math import nan
from pathlib import Path
from typing import Any

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.saved import TensorPart, add_tensors
from shardwright.checkpoint.tensor_file import StoredTensor
from shardwright.checkpoint.tensor_index import INDEX, TensorIndex

ROWS = 8


def part(name: str, first: int, stop: int, value: float) -> TensorPart:
    """Rows of a tensor of shape (8, 4), all of one value."""
    data = memoryview(array.array("d", [value] * (4 * (stop - first)))).cast("B")
    box = Box((first, 0), (stop - first, 4))
    return TensorPart(name, whole=(ROWS, 4), box=box, stored=StoredTensor("F64", box.shape, data))


def save(root: Path, step: int, *, keep: int | None = None, disk: Disk | None = None) -> None:
    """Saves what has the value of the step all over, as two ranks would."""
    disk = disk or Disk()
    folder = CheckpointFolder(root, disk=disk)
    draft = folder.begin(step)
    first, in_first = add_tensors(
        draft,
        "rank-00000.safetensors",
        [part("weight", 0, 5, step), part("bias", 0, ROWS, step)],
        disk=disk,
    )
    second, in_second = add_tensors(
        draft, "rank-00001.safetensors", [part("weight", 5, ROWS, step)], disk=disk
    )
    index = TensorIndex.joined([in_first, in_second])
    files = {
        "rank-00000.safetensors": first,
        "rank-00001.safetensors": second,
        INDEX: disk.write(draft / INDEX, [index.to_bytes()]),
        "state.json": disk.write(draft / "state.json", [b'{"step": %d}' % step]),
    }
    folder.commit(draft, step=step, files=files)
    folder.collect(keep=keep)


def pair(name: str, value: float) -> TensorPart:
    """A tensor of 1 and a value."""
    data = memoryview(array.array("d", [1.0, value])).cast("B")
    return TensorPart(name, whole=(2,), box=Box((0,), (2,)), stored=StoredTensor("F64", (2,), data))


def save_bad(root: Path, step: int, *, keep: int | None = None) -> None:
    """Saves a weight that is NaN."""
    folder, disk = CheckpointFolder(root), Disk()
    draft = folder.begin(step)
    entry, tensors = add_tensors(draft, "rank-00000.safetensors", [pair("model/w", nan)], disk=disk)
    index = TensorIndex.joined([tensors]).to_bytes()
    files = {"rank-00000.safetensors": entry, INDEX: disk.write(draft / INDEX, [index])}
    folder.commit(draft, step=step, files=files, not_finite=["w"])
    folder.collect(keep=keep)


def values(root: Path) -> set[float]:
    """All numbers of the newest checkpoint, which is verified."""
    saved = CheckpointFolder(root).open()
    saved.check()
    found = {float(saved.document("state.json")["step"]), float(saved.step)}
    for name in saved.index.tensors:
        for overlap in saved.whole(name):
            found.update(overlap.stored.data.cast("d"))
    return found


class Runs:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)
