"""Devices: which ones stand for the CPU, and `torch.device` that can be told a number."""

from collections.abc import Callable
from typing import Any

import torch

from shardwright.cpu_mode import _private

__all__ = ["DEVICE", "Device", "index_of", "is_cuda", "on_cpu", "put_translated"]

DEVICE = torch.device
_CPU = torch.device("cpu")


def is_cuda(device: Any) -> bool:
    """Whether something names a CUDA device: a text, a device, or a number."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, DEVICE):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(device: Any) -> Any:
    """The CPU for a CUDA device; anything else as it is."""
    return _CPU if is_cuda(device) else device


def index_of(device: Any, *, current: int) -> int:
    """The number of a CUDA device.

    Args:
        device: as functions of `torch.cuda` take it; None stands for the current one.
        current: number of the current device.
    """
    if isinstance(device, int):
        return device if device >= 0 else current
    if isinstance(device, str):
        device = DEVICE(device)
    index = getattr(device, "index", None)
    return current if index is None else int(index)


def put_translated(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts what `make` makes of a function in its place; nothing happens where this PyTorch lacks it."""
    original = getattr(owner, name, None)
    if original is not None:
        replacement = make(original)
        _private.let_torchscript_take(replacement, original)
        setattr(owner, name, replacement)


class _DeviceType(type):
    """Every device is an instance of `Device`, and every call makes a device of PyTorch."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, DEVICE)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device")
        if len(args) + len(kwargs) == 1 and isinstance(first, int) and not isinstance(first, bool):
            # PyTorch takes a number for that of an accelerator, and refuses it where there is none.
            return DEVICE("cuda", max(first, 0))
        return DEVICE(*args, **kwargs)


class Device(metaclass=_DeviceType):
    """Stands for `torch.device`, a class that can be neither changed nor derived from."""


Device.__name__ = Device.__qualname__ = "device"
Device.__module__ = "torch"
Device.__doc__ = torch.device.__doc__
