"""Calls the methods by which modules initialise their parameters and buffers.

An ordinary build of a module runs, in this order: its own ``reset_parameters`` (PyTorch's modules and many
others), then ``_init_weights(module)`` of the enclosing model for every module from the innermost outwards
(Hugging Face transformers, timm, and many scripts: ``self.apply(self._init_weights)``). Both are methods that
can be called again once there is memory.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["Initialise", "children_first", "initialise", "initialise_container"]

Initialise = Callable[[nn.Module], Any]


def initialise(module: nn.Module, above: Sequence[nn.Module], extra: Initialise | None = None) -> None:
    """Has a module fill the parameters and buffers that are registered on it."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            method()
            break
    initialise_container(module, above)
    if extra is not None:
        extra(module)


def initialise_container(module: nn.Module, above: Sequence[nn.Module]) -> None:
    """Has the innermost model around a module do what it does to this module when it is built."""
    for model in above:
        method = getattr(model, "_init_weights", None)
        if callable(method) and _takes_a_module(method):
            method(module)
            return


def children_first(model: nn.Module) -> list[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Every module with its name and the modules that it is in, itself included, innermost first.

    Children come before what they are in. That is the order of `nn.Module.apply`, by which models give values
    to their parts.
    """
    found: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, above: tuple[nn.Module, ...]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        above = (module, *above)
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child, above)
        found.append((name, module, above))

    visit("", model, ())
    return found


def _takes_a_module(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind(None)
    except (TypeError, ValueError):
        return False
    return True
