"""The types to which `torch.autocast` casts."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from shardwright.comm._private import uses_gpus

__all__ = ["AutocastState", "autocast_as", "autocast_state"]

AutocastState = tuple[tuple[str, bool, torch.dtype], ...]
"""For each kind of device: whether it is enabled, and its type."""


@cache
def _devices() -> tuple[str, ...]:
    # Not at import: the driver starts a thread when it is asked for GPUs.
    return ("cpu", "cuda") if uses_gpus() else ("cpu",)


def autocast_state() -> AutocastState:
    """The autocast state in force."""
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _devices())


@contextmanager
def autocast_as(state: AutocastState) -> Iterator[None]:
    """Has a former state in force."""
    with ExitStack() as stack:
        for device, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield
