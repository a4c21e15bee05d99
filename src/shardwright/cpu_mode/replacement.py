"""Replaces functions in place; decides which devices stand for the CPU."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.cpu_mode import _private

_CPU = torch.device("cpu")


def is_cuda(device: Any) -> bool:
    """Whether something names a CUDA device: a text, a device, or a number."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(device: Any) -> Any:
    """The CPU for a CUDA device; anything else as it is."""
    return _CPU if is_cuda(device) else device


def index_of(device: Any, *, current: int) -> int:
    if isinstance(device, int):
        return device if device >= 0 else current
    if isinstance(device, str):
        device = torch.device(device)
    index = getattr(device, "index", None)
    return current if index is None else int(index)


def named(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call of `torch.device` makes."""
    first = args[0] if args else kwargs.get("device")
    if len(args) + len(kwargs) == 1 and isinstance(first, int) and not isinstance(first, bool):
        return plain("cuda", max(first, 0))
    return plain(*args, **kwargs)


def put(owner: Any, name: str, function: Any) -> None:
    """Puts a function or class in a public place."""
    original = getattr(owner, name, None)
    if isinstance(function, types.FunctionType):
        in_class = inspect.isclass(owner)
        function.__module__ = owner.__module__ if in_class else owner.__name__
        function.__name__ = name
        function.__qualname__ = f"{owner.__qualname__}.{name}" if in_class else name
        if original is not None and not inspect.isclass(original):
            function.__doc__ = original.__doc__
    setattr(owner, name, function)


def put_all(found: Mapping[str, Any], *owners: Any) -> None:
    """Puts functions and classes in one or several modules, the last of which they name as their own."""
    for name, function in found.items():
        own = _twin(function) if isinstance(function, types.FunctionType) else function
        for owner in owners:
            put(owner, name, own)


def put_translated(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts what `make` makes of a function in its place; nothing happens where this PyTorch lacks it."""
    original = getattr(owner, name, None)
    if original is not None:
        replacement = make(original)
        _private.let_torchscript_take(replacement, original)
        put(owner, name, replacement)


def _twin(f: types.FunctionType) -> types.FunctionType:
    twin = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    twin.__kwdefaults__ = f.__kwdefaults__
    return twin
