"""Converts tensors to bytes and back, without a copy where none is needed."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.checkpoint.tensor_file import StoredTensor
from shardwright.errors import CheckpointError, CorruptCheckpointError

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(
            f"tensors of {dtype} cannot be saved: files have {', '.join(map(str, _NAMES))}."
        )
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The type that safetensors calls so."""
    if name not in _DTYPES:
        raise CorruptCheckpointError(f"a tensor has the type {name}, which this version does not know.")
    return _DTYPES[name]


def stored(tensor: Tensor) -> StoredTensor:
    """The elements of a tensor on the CPU, in row-major order; shares its memory where it is contiguous."""
    dtype = dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided:
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}, and only dense ones can be saved."
        )
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return StoredTensor(dtype, tuple(tensor.shape), memoryview(content))


def tensor_of(part: StoredTensor) -> Tensor:
    """A tensor on the CPU, in the memory of what was stored."""
    dtype = dtype_of(part.dtype)
    if not part.data.nbytes:
        return torch.empty(part.shape, dtype=dtype)
    return torch.frombuffer(part.data, dtype=dtype).reshape(part.shape)


def read_part(saved: SavedCheckpoint, name: str, box: Box | None = None) -> Tensor:
    entry = saved.entry(name)
    dtype = dtype_of(entry.dtype)
    wanted = Box.whole(entry.shape) if box is None else box
    target = torch.empty(wanted.shape, dtype=dtype)
    _fill(target, saved, name, wanted)
    return target


def read_into(target: Tensor, saved: SavedCheckpoint, name: str, boxes: Iterable[Box] | None = None) -> None:
    """Fills a tensor, of any type and on any device, with a tensor of a checkpoint or a part of one."""
    with torch.no_grad():
        if boxes is None:
            _fill(target, saved, name, Box.whole(saved.entry(name).shape))
            return
        place = 0
        for box in boxes:
            part = target[place : place + box.numel]
            part.copy_(read_part(saved, name, box).reshape(-1))
            place += box.numel


def _fill(target: Tensor, saved: SavedCheckpoint, name: str, box: Box) -> None:
    for overlap in saved.overlaps(name, box):
        piece = tensor_of(overlap.stored)
        target[overlap.target.slices].copy_(piece[overlap.source.slices])
