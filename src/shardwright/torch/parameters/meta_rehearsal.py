"""Finds meta-device modules that nothing initialises, without allocating memory.

Each module's initialisation runs on the meta device, where it computes nothing, and its writes are watched.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.torch._private import storage_key
from shardwright.torch.parameters.delayed_initialization import is_recorded
from shardwright.torch.parameters.first_values import children_first, initialise

__all__ = ["Unknown", "unknown_values"]


@dataclass(frozen=True, slots=True)
class Unknown:
    """A module with tensors that nothing fills.

    Attributes:
        name: where it is in the model.
    """

    name: str
    class_name: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.missing)} of {self.class_name} ({self.name or 'the model itself'})"


def unknown_values(model: nn.Module) -> list[Unknown]:
    """Modules with meta tensors (parameters, buffers, plain attributes) that keep no values when filled.

    A module whose code cannot run without data is passed over: it is seen when it gets its memory.
    """
    found = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module, above in children_first(model):
            if not any(tensor.is_meta and not is_recorded(tensor) for tensor in _held(module).values()):
                continue
            missing = _missing(module, above)
            if missing:
                found.append(Unknown(name, type(module).__name__, missing))
    return found


def _missing(module: nn.Module, above: tuple[nn.Module, ...]) -> tuple[str, ...]:
    before = _held(module)
    attributes = dict(vars(module))
    registries = [(r, dict(r)) for r in (module._parameters, module._buffers)]
    watch = _Writes()
    try:
        with watch:
            initialise(module, above)
        after = _held(module)
    except Exception:
        return ()
    finally:
        vars(module).clear()
        vars(module).update(attributes)
        for registry, content in registries:
            registry.clear()
            registry.update(content)  # type: ignore[arg-type]
    return tuple(
        key
        for key, tensor in before.items()
        if tensor.is_meta
        and not is_recorded(tensor)
        and after.get(key) is tensor
        and storage_key(tensor) not in watch.written
    )


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a module: parameters and buffers that are registered on it, and plain attributes."""
    found = {**vars(module), **module._parameters, **module._buffers}
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


class _Writes(TorchDispatchMode):
    """Notes the storages that operations write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor):
                with contextlib.suppress(NotImplementedError):  # a tensor without storage
                    self.written.add(storage_key(value))
        return func(*args, **(kwargs or {}))
