"""Records the original shape and type of buffers that a forward changes.

Observers of quantisation-aware training change them, and so do statistics sized by the first batch. A
checkpoint records the original form of each such buffer, so that a run resumes with the saved one::

    built     scale: (1,)                  built     scale: (1,)     as it was at first when it was saved
    trained   scale: (16,)   ── saved ──>  resumed   scale: (16,)

A buffer of another original shape belongs to another model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BufferKind", "first_kinds"]


@dataclass(frozen=True, slots=True)
class BufferKind:
    """The form of a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "BufferKind":
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor is that; asked in every step."""
        return tensor.dtype is self.dtype and tensor.shape == self.shape

    def to_json(self) -> list[Any]:
        return [str(self.dtype).removeprefix("torch."), *self.shape]

    @classmethod
    def from_json(cls, content: list[Any]) -> "BufferKind | None":
        """The reverse of `to_json`; None for anything else."""
        name, *shape = content or [None]
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            return None
        return cls(tuple(shape), dtype)


def first_kinds(model: nn.Module) -> dict[str, BufferKind]:
    """The current forms of a model's buffers, by name."""
    return {name: BufferKind.of(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
