"""Devices: decides which ones stand for the CPU."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["index_of", "is_cuda", "named", "on_cpu"]

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
    """The number of a CUDA device."""
    if isinstance(device, int):
        return device if device >= 0 else current
    if isinstance(device, str):
        device = torch.device(device)
    index = getattr(device, "index", None)
    return current if index is None else int(index)


def named(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call of `torch.device` makes.

    PyTorch takes a lone number for that of an accelerator, and refuses it where there is none.
    """
    first = args[0] if args else kwargs.get("device")
    if len(args) + len(kwargs) == 1 and isinstance(first, int) and not isinstance(first, bool):
        return plain("cuda", max(first, 0))
    return plain(*args, **kwargs)
