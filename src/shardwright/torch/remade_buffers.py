"""Buffers to which a forward gives another shape or type than the model was built with.

Observers of quantisation-aware training do, and statistics that get their size from the first batch. A
checkpoint says of each such buffer what it was at first, so that a run goes on with what was saved::

    built     scale: (1,)                  built     scale: (1,)     as it was at first when it was saved
    trained   scale: (16,)   ── saved ──>  resumed   scale: (16,)

A buffer of another first shape belongs to another model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.torch._private import non_persistent_buffers
from shardwright.torch.functions import RELEASED

if TYPE_CHECKING:
    from shardwright.torch.model import DistributedModel

__all__ = ["BufferKind", "first_kinds", "remade_buffers", "remake"]


@dataclass(frozen=True, slots=True)
class BufferKind:
    """What a buffer is.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "BufferKind":
        """What a tensor is."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor is that; asked in every step."""
        return tensor.dtype is self.dtype and tensor.shape == self.shape

    def to_json(self) -> list[Any]:
        """A list of JSON."""
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
    """What the buffers of a model are now, by name."""
    return {name: BufferKind.of(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}


def remade_buffers(model: "DistributedModel") -> dict[str, list[Any] | None]:
    """What buffers of this rank that are others now were at first, as JSON; None for new ones.

    Args:
        model: the wrapped model, between two steps.
    """
    transient = non_persistent_buffers(model.get_module())
    found: dict[str, list[Any] | None] = {}
    for name, buffer in model.get_module().named_buffers():
        first = model.first_buffers.get(name)
        if name in transient or not model.counts_here(name) or first == BufferKind.of(buffer):
            continue
        found[name] = None if first is None else first.to_json()
    return found


def remake(model: "DistributedModel", kinds: Mapping[str, BufferKind]) -> None:
    """Gives buffers of this rank other shapes and types, without values; makes those that are not there.

    Args:
        model: the wrapped model.
        kinds: what they are to be, by name.
    """
    modules = dict(model.get_module().named_modules(remove_duplicate=False))
    for name, module, key in _places(kinds, modules):
        kind, buffer = kinds[name], module._buffers.get(key)
        if buffer is None:
            if not model.partitioned or model.counts_here(name):
                device = _device_of(module, model)
                module.register_buffer(key, torch.empty(kind.shape, dtype=kind.dtype, device=device))
        elif not hasattr(buffer, RELEASED) and BufferKind.of(buffer) != kind:
            buffer.data = torch.empty(kind.shape, dtype=kind.dtype, device=buffer.device)


def _places(
    names: Mapping[str, BufferKind], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, nn.Module, str]]:
    for name in names:
        path, _, key = name.rpartition(".")
        if path in modules:
            yield name, modules[path], key


def _device_of(module: nn.Module, model: "DistributedModel") -> torch.device:
    """Where the tensors of a module are, or else those of the model."""
    for tensors in (module.parameters(), module.buffers(), model.get_module().parameters()):
        if (first := next(tensors, None)) is not None:
            return first.device
    return torch.device("cpu")
