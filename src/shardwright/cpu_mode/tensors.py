"""Tensor and storage methods: a tensor moved to CUDA stays in place."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.cpu_mode.callers import script_asks
from shardwright.cpu_mode.devices import on_cpu
from shardwright.cpu_mode.factories import made_on_cpu
from shardwright.cpu_mode.replacement import put, put_translated

__all__ = ["put_in_force", "sent_to_cpu"]

_MAKERS = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_MAY_BE_DEVICE = (str, int, torch.device)


def put_in_force() -> None:
    """Replaces the methods."""
    cls: Any = Tensor
    plain_to = cls.to
    put(cls, "to", sent_to_cpu(plain_to))

    @functools.wraps(cls.cuda)
    def cuda(
        self: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> Any:
        return plain_to(self, device="cpu", memory_format=memory_format)

    put(cls, "cuda", cuda)
    for name in _MAKERS:
        put_translated(cls, name, made_on_cpu)
    # Pinned memory is what a GPU reads from: without one there is nothing that would be faster with it.
    put_translated(cls, "pin_memory", _as_it_is)
    put_translated(cls, "record_stream", _without_effect)
    cls.is_cuda = property(_seen_on_cuda(cls.is_cuda), doc=cls.is_cuda.__doc__)
    put_translated(cls, "type", _type_on_cuda)
    untyped: Any = torch.UntypedStorage
    untyped.__new__ = staticmethod(_storage_on_cpu(untyped.__new__))
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        put_translated(storage, "cuda", _as_it_is)
        put_translated(storage, "to", sent_to_cpu)
        put_translated(storage, "pin_memory", _as_it_is)


def _as_it_is(method: Callable[..., Any]) -> Callable[..., Any]:
    """For a method that would move an object to where there is nothing."""

    @functools.wraps(method)
    def as_it_is(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return as_it_is


def _without_effect(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    return nothing


def _storage_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return make(cls, *args, **kwargs)

    return __new__


def sent_to_cpu(send: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``to``, whose device comes first, or is named."""

    @functools.wraps(send)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], _MAY_BE_DEVICE):
            args = (on_cpu(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return send(self, *args, **kwargs)

    return to


def _seen_on_cuda(is_cuda: Any) -> Callable[[Tensor], bool]:
    """``is_cuda``: true of what is on the CPU where the script asks, for there all of it stands for a GPU."""

    def seen_on_cuda(self: Tensor) -> bool:
        if script_asks():
            return self.device.type == "cpu"
        return bool(is_cuda.__get__(self))

    return seen_on_cuda


def _type_on_cuda(kind_of: Callable[..., Any]) -> Callable[..., Any]:
    """``type()`` says to the script that a tensor is on CUDA; ``type("torch.cuda.HalfTensor")`` works."""

    @functools.wraps(kind_of)
    def type_on_cuda(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        found = kind_of(self, dtype, *args, **kwargs) if dtype is not None else kind_of(self)
        if dtype is None and self.device.type == "cpu" and script_asks():
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    return type_on_cuda
