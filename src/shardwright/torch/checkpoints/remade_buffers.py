"""Saves and restores buffers whose shape or type training has changed (see `BufferKind`)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.torch._private import non_persistent_buffers
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.parameters.buffer_kind import BufferKind
from shardwright.torch.pytorch.functions import RELEASED

__all__ = ["remade_buffers", "remake"]


def remade_buffers(model: DistributedModel) -> dict[str, list[Any] | None]:
    """The first form of this rank's buffers that were replaced since, as JSON; None for new ones."""
    transient = non_persistent_buffers(model.get_module())
    found: dict[str, list[Any] | None] = {}
    for name, buffer in model.get_module().named_buffers():
        first = model.first_buffers.get(name)
        if name in transient or not model.counts_here(name) or first == BufferKind.of(buffer):
            continue
        found[name] = None if first is None else first.to_json()
    return found


def remake(model: DistributedModel, kinds: Mapping[str, BufferKind]) -> None:
    """Gives buffers of this rank other shapes and types, without values; makes those that are not there."""
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


def _device_of(module: nn.Module, model: DistributedModel) -> torch.device:
    """The device of a module's tensors, or else of the model's."""
    for tensors in (module.parameters(), module.buffers(), model.get_module().parameters()):
        if (first := next(tensors, None)) is not None:
            return first.device
    return torch.device("cpu")
