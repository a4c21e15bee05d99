"""Tensor files in the safetensors layout: https://github.com/huggingface/safetensors.

::

    8 bytes                 n, little endian
    n bytes                 JSON: name -> {dtype, shape, data_offsets: [begin, end]}
    rest                    the tensors, one behind the other

We write the file piece by piece from the tensors' memory, hashing on the way, and read any part of it in
place. Tests read our files with the safetensors library, and its files with ours.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.checkpoint.safe_files import open_regular, parse, size_of
from shardwright.errors import CorruptCheckpointError

ITEM_BYTES = {
    "C128": 16,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_LARGEST_HEADER = 100 * 2**20  # bytes, as the safetensors library has it
# MAP_NORESERVE, which Python names from 3.13 on.
_NO_RESERVE: int = getattr(
    mmap, "MAP_NORESERVE", 0x4000 if os.uname()[::4] in (("Linux", "x86_64"), ("Linux", "aarch64")) else 0
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, or a piece of one, as bytes.

    Attributes:
        dtype: as safetensors names it: ``F32``, ``BF16``, ...
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that is read when it is written, part by part."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterable[bytes | memoryview]]

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    @classmethod
    def of(cls, tensor: StoredTensor) -> "TensorSource":
        return cls(tensor.dtype, tensor.shape, lambda: [tensor.data] if tensor.data.nbytes else [])


def file_content(
    tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    yield from streamed_content({name: TensorSource.of(each) for name, each in tensors.items()}, metadata)


def streamed_content(
    tensors: Mapping[str, TensorSource], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The content of a file with tensors that are read one after the other."""
    names = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 16)  # so that tensors lie as their types want it
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        num_bytes = 0
        for part in tensors[name].read():
            num_bytes += memoryview(part).nbytes
            yield part
        if num_bytes != tensors[name].num_bytes:
            raise ValueError(f"{name} has {num_bytes} bytes, and needs {tensors[name].num_bytes}")


class TensorFile:
    """A file of tensors, mapped into memory; nothing is read before it is asked for."""

    def __init__(self, path: Path):
        self._name = path.name
        with open_regular(path) as file:
            size = size_of(file)
            length = int.from_bytes(file.read(8), "little") if size >= 8 else size
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise self._refused(f"its header claims {length} bytes, and the file has {size}")
            header = parse(file.read(length), name=path.name)
            self._memory = memoryview(_mapped(file))
        self._begin = 8 + length
        if not isinstance(header, dict):
            raise self._refused("its header is no object")
        header.pop("__metadata__", None)
        self._entries = {name: self._entry(name, found) for name, found in header.items()}
        self._check_places(size - self._begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> str:
        return self._entries[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def __getitem__(self, name: str) -> StoredTensor:
        dtype, shape, begin, end = self._entries[name]
        return StoredTensor(dtype, shape, self._memory[self._begin + begin : self._begin + end])

    def _entry(self, name: str, found: Any) -> tuple[str, tuple[int, ...], int, int]:
        if not isinstance(found, dict) or set(found) != {"dtype", "shape", "data_offsets"}:
            raise self._refused(f"{name!r} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise self._refused(f"{name!r} has the type {dtype!r}")
        if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
            raise self._refused(f"{name!r} has the shape {shape!r} at {offsets!r}")
        begin, end = offsets
        if end - begin != ITEM_BYTES[dtype] * prod(shape):
            raise self._refused(f"{name!r} has {end - begin} bytes for {dtype} of shape {shape}")
        return dtype, tuple(shape), begin, end

    def _check_places(self, size: int) -> None:
        """Tensors fill the file: none lies in another one, or behind the end."""
        place = 0
        for name, (_, _, begin, end) in sorted(self._entries.items(), key=lambda item: item[1][2:]):
            if begin != place:
                raise self._refused(f"{name!r} begins at {begin}, and not at {place}")
            place = end
        if place != size:
            raise self._refused(f"its tensors have {place} bytes, and the file has {size} for them")

    def _refused(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._name} is damaged, or no file of tensors: {why}.")


def _mapped(file: BinaryIO) -> mmap.mmap:
    """A file as memory, of which only what is used takes any.

    Private pages: tensors made of them may be written to, and the file stays as it is. The system reserves
    nothing for that: a file may be larger than all memory.
    """
    return mmap.mmap(
        file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )


def _sizes(found: Any) -> bool:
    """Whether it is a list of lengths; so that products of them stay small, too."""
    return isinstance(found, Sequence) and all(type(n) is int and 0 <= n < 2**60 for n in found)
