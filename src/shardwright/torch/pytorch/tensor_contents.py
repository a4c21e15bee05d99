"""Copies tensor contents, to restore those changed in place."""

from typing import Any

import torch
from torch import Tensor

from shardwright.errors import TraceError

__all__ = ["TensorContents", "has_content"]

_MOST_BYTES = 2**30


def has_content(tensor: Tensor) -> bool:
    """Whether it has data in a memory of its own; False for parameters and other kinds of tensors."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_inference() or tensor.is_quantized)


class TensorContents:
    """Copies the memory of tensors, once for those that share it."""

    def __init__(self, most_bytes: float = _MOST_BYTES) -> None:
        self._bytes_left = most_bytes
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._tensors: list[tuple[Tensor, Tensor, int, int]] = []  # it, an alias, its version and memory

    def keep(self, tensor: Tensor) -> None:
        """Records a tensor that `has_content`."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self._kept:
            # One dimension over all of it: views may have holes, or one entry many times.
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
            fits = whole.nbytes <= self._bytes_left
            self._bytes_left -= whole.nbytes if fits else 0
            self._kept[key] = (whole, whole.clone() if fits else None)
        self._tensors.append((tensor, tensor.detach(), tensor._version, key))

    def restore(self) -> TraceError | None:
        """Restores tensors, also their shape, type and memory; returns an error if one has no copy."""
        error = None
        for tensor, alias, version, key in self._tensors:
            whole, content = self._kept[key]
            if alias.untyped_storage().nbytes() != whole.nbytes:  # `resize_` may change it in place
                alias.untyped_storage().resize_(whole.nbytes)
            if _placed(tensor) != _placed(alias):
                tensor.data = alias
            if content is None and tensor._version != version:
                error = TraceError(
                    f"a tensor of {whole.nbytes / 2**30:.1f} GiB, in an attribute of a module or in an "
                    "object that it holds, is changed in place when the model is traced, and is too large "
                    "to be put back. Register it as a buffer: "
                    "module.register_buffer(name, tensor, persistent=False)."
                )
        for whole, content in self._kept.values():
            if content is not None and not torch.equal(whole, content):
                whole.copy_(content)
        return error


def _placed(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor is, and where in which memory."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
