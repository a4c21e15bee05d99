"""What computes a module's attention: a mark on the module itself, so that copies of it are routed, too.

A class that computes attention gets one method replaced, once, by one that looks for the mark. Modules
without it run the original, so that models which are created elsewhere stay as they are.
"""

import functools
from collections.abc import Callable
from dataclasses import astuple
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardwright.torch.attention.kernels import Choice

__all__ = [
    "PLAIN",
    "Choices",
    "is_plain",
    "is_routed",
    "left_alone",
    "mark_left_alone",
    "mark_routed",
    "route_method",
]

# The table's word for attention that keeps all scores because the script wants it to.
PLAIN = Choice("plain", "flash_attention=False")

_MARK = "_shardwright_attention"
_FUSED = "fused"
_REPLACES = "_shardwright_replaces"


def mark_routed(module: nn.Module, *, fused: bool = True) -> None:
    """Has the attention of a module routed: to a kernel that keeps no scores, or to plain attention."""
    vars(module)[_MARK] = _FUSED if fused else astuple(PLAIN)


def mark_left_alone(module: nn.Module, choice: Choice) -> None:
    """Has a module compute its attention as it does, and the table say how and why."""
    # No class of ours, so that a pickled module needs no shardwright.
    vars(module)[_MARK] = astuple(choice)


def is_routed(module: nn.Module) -> bool:
    """Whether our functions compute a module's attention; not in compiled code, where PyTorch fuses."""
    return (vars(module).get(_MARK) == _FUSED or is_plain(module)) and not torch.compiler.is_compiling()


def is_plain(module: nn.Module) -> bool:
    """Whether a module is to keep all scores."""
    return vars(module).get(_MARK) == astuple(PLAIN)


def left_alone(module: nn.Module) -> Choice | None:
    """How and why a module computes its attention as it does; None where nobody has said so."""
    mark = vars(module).get(_MARK)
    return Choice(*mark) if isinstance(mark, tuple) else None


def route_method(owner: Any, name: str, routed: Callable[..., Any]) -> None:
    """Replaces a method of a class, once."""
    original = getattr(owner, name)
    if _REPLACES in vars(original) and vars(original)[_REPLACES] is owner:
        return

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_routed(self):
            return original(self, *args, **kwargs)
        return routed(original, self, *args, **kwargs)

    vars(method)[_REPLACES] = owner
    setattr(owner, name, method)


class Choices:
    """What each module took last; not on the modules, whose attributes a trace puts back."""

    _of: WeakKeyDictionary[nn.Module, Choice] = WeakKeyDictionary()  # noqa: RUF012

    @classmethod
    def note(cls, module: nn.Module, choice: Choice) -> None:
        """A module was called."""
        cls._of[module] = choice

    @classmethod
    def of(cls, module: nn.Module) -> Choice | None:
        """What a module took; None before it is called."""
        return cls._of.get(module)
