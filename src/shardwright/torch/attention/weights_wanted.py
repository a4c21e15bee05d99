"""Attention weights that a script asks for: only plain attention has them."""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardwright.torch.attention.kernels import Choice
from shardwright.torch.attention.marks import Choices

__all__ = ["call_with_request", "say_plain", "weights_are_wanted"]

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
