"""Random numbers of code that a step function passes to `torch.utils.checkpoint`.

`checkpoint` saves the state of the generators before it runs the code, and restores it to recompute. But a
unit inside gets its own state only when it is called, so the saved state would be that of whatever ran before
on this rank. So the state of the next draw is set before `checkpoint` saves.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.torch.interception.glue import active_handler

__all__ = ["generators_saved_in_turn"]


@contextmanager
def generators_saved_in_turn() -> Iterator[None]:
    """Has `torch.utils.checkpoint` save the state from which the code that it runs will draw."""
    original = torch.get_rng_state

    def get_rng_state() -> Tensor:
        handler: Any = active_handler()
        is_checkpoint = sys._getframe(1).f_globals.get("__name__") == "torch.utils.checkpoint"
        if is_checkpoint and hasattr(handler, "set_next_generators"):
            handler.set_next_generators()
        return original()

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = original
