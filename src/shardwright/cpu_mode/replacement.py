"""Replaces functions in place, with their names and modules, so that lookups find them there."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.cpu_mode import _private

__all__ = ["put", "put_all", "put_translated"]


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
