"""The index of a checkpoint: the names of tensors, and the positions of every tensor's pieces.

The index does not depend on who saved: a tensor has its full name and global shape, and a piece of it is a
box.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import NonNegativeInt

from shardwright.checkpoint.boxes import Box, covered_once
from shardwright.checkpoint.disk import FORMAT_VERSION, Record
from shardwright.checkpoint.tensor_file import ITEM_BYTES, TensorFile
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.text import shortened

MODEL = "model/"
"""What the names of a model's tensors begin with in a checkpoint."""


def without_prefix(names: Iterable[str], prefix: str, *, where: str) -> dict[str, str]:
    """Takes a prefix from names; returns the names that are left, by the names before."""
    every = list(names)
    lacking = [name for name in every if not name.startswith(prefix) or name == prefix]
    if lacking:
        raise CheckpointError(
            f"{len(lacking)} of {len(every)} tensors of {where} have no prefix {prefix!r}: "
            f"{shortened(in_order(lacking), most=5)}. Give "
            "the prefix that all of them have, or none."
        )
    return {name: name[len(prefix) :] for name in every}


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted, with numbers in them as numbers.

    >>> in_order(["h.10.bias", "h.2.bias", "wte"])
    ['h.2.bias', 'h.10.bias', 'wte']
    """
    return sorted(names, key=_key)


def _key(name: str) -> list[tuple[int, int, str]]:
    return [(1, int(part), "") if _is_number(part) else (0, 0, part) for part in name.split(".")]


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 20


INDEX = "tensors.json"


class Piece(Record):
    """A part of a tensor, in a file.

    Attributes:
        key: the name of the piece in it.
        offset: where the piece begins in the tensor, in each dimension.
    """

    file: str
    key: str
    offset: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


class TensorEntry(Record):
    """A tensor.

    Attributes:
        pieces: of which it is made; each element is in exactly one.
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    pieces: tuple[Piece, ...]


class TensorIndex(Record):
    version: Literal[1] = FORMAT_VERSION
    tensors: dict[str, TensorEntry]

    @classmethod
    def joined(cls, parts: Iterable[Mapping[str, TensorEntry]]) -> "TensorIndex":
        """The index of what several ranks have written."""
        tensors: dict[str, TensorEntry] = {}
        for part in parts:
            for name, entry in part.items():
                known = tensors.get(name)
                if known is None:
                    tensors[name] = entry
                    continue
                if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"{name} is {entry.dtype} of shape {entry.shape} on one rank, and {known.dtype} of "
                        f"shape {known.shape} on another. Build the same model on every rank."
                    )
                tensors[name] = known.model_copy(update={"pieces": (*known.pieces, *entry.pieces)})
        for name, entry in tensors.items():
            if not _is_complete(entry):
                raise CheckpointError(
                    f"parts of {name} are missing, or there twice: its shape is {entry.shape}, and what "
                    f"ranks gave is {[piece.box for piece in entry.pieces][:8]}. Nothing was committed."
                )
        return cls(tensors=tensors)

    def check(self, files: Mapping[str, TensorFile]) -> None:
        for name, entry in self.tensors.items():
            if entry.dtype not in ITEM_BYTES:
                raise CorruptCheckpointError(f"{INDEX}: {name} has the type {entry.dtype!r}.")
            for piece in entry.pieces:
                file = files.get(piece.file)
                if file is None or piece.key not in file:
                    raise CorruptCheckpointError(
                        f"{INDEX}: a piece of {name} is {piece.key!r} of {piece.file}, which is not there."
                    )
                if (file.dtype(piece.key), file.shape(piece.key)) != (entry.dtype, piece.shape):
                    raise CorruptCheckpointError(
                        f"{INDEX}: a piece of {name} is {entry.dtype} of shape {piece.shape}, and "
                        f"{file.dtype(piece.key)} of shape {file.shape(piece.key)} in {piece.file}."
                    )
            if not _is_complete(entry):
                raise CorruptCheckpointError(f"{INDEX}: the pieces of {name} do not make up {entry.shape}.")


def _is_complete(entry: TensorEntry) -> bool:
    boxes = [piece.box for piece in entry.pieces]
    return all(box.inside(entry.shape) for box in boxes) and covered_once(entry.shape, boxes)
