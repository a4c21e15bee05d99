"""A checkpoint on disk: during its write, invisible until committed; and opened for reading."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import Disk, FileEntry, Manifest, has_content
from shardwright.checkpoint.safe_files import parse, read_regular, reading
from shardwright.checkpoint.tensor_file import StoredTensor, TensorFile, file_content
from shardwright.checkpoint.tensor_index import INDEX, Piece, TensorEntry, TensorIndex
from shardwright.errors import CorruptCheckpointError

log = logging.getLogger(__name__)


class TensorPart:
    __slots__ = ("box", "name", "stored", "whole")

    def __init__(self, name: str, *, whole: tuple[int, ...], box: Box, stored: StoredTensor):
        self.name = name
        self.whole = whole
        self.box = box
        self.stored = stored


def add_tensors(
    folder: Path,
    name: str,
    parts: Iterable[TensorPart],
    *,
    disk: Disk,
    earlier: "SavedCheckpoint | None" = None,
) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """Writes a file of tensors; where an earlier checkpoint has the same one, as a link to that."""
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
    content = list(file_content(stored))
    same = None if earlier is None else earlier.manifest.files.get(name)
    if earlier is not None and same is not None and _may_be_shared(earlier.path / name, content):
        try:
            disk.link(earlier.path / name, folder / name)
        except OSError as error:  # no links on this file system
            log.info("unchanged weights are written again, as they cannot be linked: %s", error)
        else:
            disk.sync_folder(folder)
            return same, entries
    with disk.together() as files:
        return files.write(folder / name, content), entries


_MOST_NAMES = 4
"""Checkpoints that share a file: damage on the disk is that of all of them."""


def _may_be_shared(path: Path, content: Sequence[bytes | memoryview]) -> bool:
    """Whether a file has this content, and few enough checkpoints share it."""
    try:
        return path.stat().st_nlink < _MOST_NAMES and has_content(path, content)
    except OSError:
        return False


LARGEST_TEXT = 2**30
"""Most bytes of a file of JSON that are read: the index of about three million pieces."""


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The overlap of a piece on disk with a requested part."""

    source: Box
    target: Box
    stored: StoredTensor


class SavedCheckpoint:
    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        self.manifest = manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.manifest.files.values())

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Weights that have infinities or NaN, by their names in the model."""
        return self.manifest.not_finite or ()

    @property
    def has_finite_weights(self) -> bool:
        """Whether there are none, as far as the save has looked."""
        return not self.not_finite

    @cached_property
    def index(self) -> TensorIndex:
        content = read_regular(self._listed(INDEX), most_bytes=LARGEST_TEXT)
        return TensorIndex.from_bytes(content, name=str(self.path / INDEX))

    @cached_property
    def _files(self) -> dict[str, TensorFile]:
        names = [name for name in self.manifest.files if name.endswith(".safetensors")]
        return {name: TensorFile(self._listed(name)) for name in names}

    def map_files(self) -> None:
        """Opens all files, which can be read from then on also where somebody removes them."""
        assert self._files is not None

    def forget_files(self) -> None:
        """Closes all files; the space of removed ones becomes free when nothing refers to their tensors."""
        self.__dict__.pop("_files", None)

    def check(self) -> None:
        """Compares the list of tensors with the files that have them."""
        with reading(self.path):
            self.index.check(self._files)

    def document(self, name: str) -> Any:
        return parse(read_regular(self._listed(name), most_bytes=LARGEST_TEXT), name=str(self.path / name))

    def entry(self, name: str) -> TensorEntry:
        found = self.index.tensors.get(name)
        if found is None:
            raise CorruptCheckpointError(f"{self.path} has no tensor {name}.")
        return found

    def overlaps(self, name: str, box: Box) -> Iterator[_Overlap]:
        for piece in self.entry(name).pieces:
            common = piece.box.common(box)
            if common is not None:
                stored = self._files[piece.file][piece.key]
                yield _Overlap(common.relative_to(piece.box), common.relative_to(box), stored)

    def whole(self, name: str) -> Sequence[_Overlap]:
        return list(self.overlaps(name, Box.whole(self.entry(name).shape)))

    def _listed(self, name: str) -> Path:
        if name not in self.manifest.files:
            raise CorruptCheckpointError(f"{self.path} has no {name}.")
        return self.path / name
