"""A checkpoint during its write: invisible until it is committed."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.float_types import not_finite
from shardwright.checkpoint.manifest import FileEntry
from shardwright.checkpoint.model_names import MODEL
from shardwright.checkpoint.tensor_file import StoredTensor, file_content
from shardwright.checkpoint.tensor_index import Piece, TensorEntry

__all__ = ["TensorPart", "add_file", "add_tensors", "not_finite_in"]


class TensorPart:
    """A part of a tensor, to be saved.

    Attributes:
        name: full name of the tensor.
        box: which part of it this is.
    """

    __slots__ = ("box", "name", "stored", "whole")

    def __init__(self, name: str, *, whole: tuple[int, ...], box: Box, stored: StoredTensor):
        self.name = name
        self.whole = whole
        self.box = box
        self.stored = stored


def add_file(folder: Path, name: str, content: Iterable[bytes | memoryview], *, disk: Disk) -> FileEntry:
    """Writes a file of a draft."""
    written = disk.write(folder / name, content)
    return FileEntry(size=written.size, sha256=written.sha256)


def add_tensors(
    folder: Path, name: str, parts: Iterable[TensorPart], *, disk: Disk
) -> tuple[FileEntry, Mapping[str, TensorEntry]]:
    """Writes a file of tensors of a draft."""
    entries: dict[str, TensorEntry] = {}
    stored: dict[str, StoredTensor] = {}
    for part in parts:
        known = entries.get(part.name)
        pieces = () if known is None else known.pieces
        key, number = part.name, len(pieces)
        while key in stored:
            key, number = f"{part.name}#{number}", number + 1
        stored[key] = part.stored
        piece = Piece(file=name, key=key, offset=part.box.offset, shape=part.box.shape)
        entries[part.name] = TensorEntry(dtype=part.stored.dtype, shape=part.whole, pieces=(*pieces, piece))
    return add_file(folder, name, file_content(stored), disk=disk), entries


def not_finite_in(parts: Iterable[TensorPart], *, parameters: Collection[str]) -> list[str]:
    """Weights that have infinities or NaN, by their names in the model.

    Buffers may be infinite, as masks for attention are, but no buffer is NaN on purpose.
    """
    found: dict[str, None] = {}
    for part in parts:
        if part.name.startswith(MODEL) and part.name not in found:
            problem = not_finite(part.stored.data, part.stored.dtype)
            if problem.nan or (problem.infinite and part.name in parameters):
                found[part.name] = None
    return [name.removeprefix(MODEL) for name in found]
