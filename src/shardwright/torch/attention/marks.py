"""What computes a module's attention: a mark on it, the table of marks, weights that scripts ask for.

A class that computes attention gets one method replaced, once, by one that looks for the mark. Modules
without it run the original, so that models which are created elsewhere stay as they are.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import astuple
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardwright.torch.attention.kernels import Choice

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


log = logging.getLogger(__name__)

# A context variable: each microbatch is a greenlet, which has values of its own.
_WANTED: ContextVar[bool] = ContextVar("attention weights are wanted", default=False)


class _Said:
    """Whether the script has been told."""

    already = False


def call_with_request(
    original: Callable[..., Any], module: nn.Module, *args: Any, output_attentions: Any = False, **kwargs: Any
) -> Any:
    """Calls the forward of an attention module, whose inner functions are not told what it was asked for."""
    token = _WANTED.set(bool(output_attentions))
    try:
        return original(module, *args, output_attentions=output_attentions, **kwargs)
    finally:
        _WANTED.reset(token)


def weights_are_wanted() -> bool:
    """Whether the attention module that runs was asked for its weights."""
    return _WANTED.get()


def say_plain(module: nn.Module) -> None:
    """Takes note of a module that computes plain attention, and tells the script once."""
    Choices.note(module, Choice("eager", "its weights are asked for"))
    if not _Said.already:
        _Said.already = True
        log.warning(
            "attention weights are asked for (output_attentions=True, or need_weights=True), and only plain "
            "attention has them: it is computed where they are, and keeps all scores."
        )


def kernels_of(model: nn.Module) -> dict[str, Choice]:
    """What the attention of each layer is computed by, by the name of its module."""
    found = {name: Choices.of(module) or left_alone(module) for name, module in model.named_modules()}
    return {name: choice for name, choice in found.items() if choice is not None}


def attention_table(model: nn.Module) -> str:
    """The table, with one line for layers that took the same; empty without such layers."""
    rows: dict[Choice, list[str]] = {}
    for name, choice in kernels_of(model).items():
        rows.setdefault(choice, []).append(name)
    if not rows:
        return ""
    cells = [(_names(names), choice.kernel, choice.why_not_fused) for choice, names in rows.items()]
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    return "\n".join(
        f"  {layers:<{widths[0]}}  {kernel:<{widths[1]}}  {why}".rstrip() for layers, kernel, why in cells
    )


def _names(names: Iterable[str]) -> str:
    first, *rest = names
    return first if not rest else f"{first} ... {rest[-1]} ({1 + len(rest)})"
