"""Mixed precision: autocast and scalers for CUDA are those of the CPU, with the default types of CUDA."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardwright.cpu_mode.devices import is_cuda

__all__ = ["put_in_force"]


def put_in_force() -> None:
    """Replaces the functions."""
    autocast: Any = torch.amp.autocast_mode.autocast
    autocast.__init__ = _autocast_on_cpu(autocast.__init__, torch.get_autocast_dtype)
    scaler: Any = torch.amp.grad_scaler.GradScaler
    scaler.__init__ = _scaler_on_cpu(scaler.__init__)
    amp: Any = torch.amp
    amp.custom_fwd, amp.custom_bwd = _function_on_cpu(amp.custom_fwd), _function_on_cpu(amp.custom_bwd)
    core: Any = torch
    is_enabled, dtype_of = core.is_autocast_enabled, core.get_autocast_dtype
    core.is_autocast_enabled = functools.wraps(is_enabled)(
        lambda device_type="cuda": is_enabled(_kind(device_type))
    )

    def dtype_in_force(device_type: str) -> torch.dtype:
        on_cuda = is_cuda(device_type)
        return dtype_of("cpu" if on_cuda and is_enabled("cpu") else device_type)  # type: ignore[no-any-return]

    core.get_autocast_dtype = functools.wraps(dtype_of)(dtype_in_force)
    core.get_autocast_gpu_dtype = functools.wraps(core.get_autocast_gpu_dtype)(lambda: dtype_in_force("cuda"))


def _kind(device_type: str) -> str:
    return "cpu" if is_cuda(device_type) else device_type


def _autocast_on_cpu(init: Callable[..., Any], dtype_of: Callable[[str], torch.dtype]) -> Callable[..., Any]:
    @functools.wraps(init)
    def __init__(  # noqa: N807
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if is_cuda(device_type):
            device_type, dtype = "cpu", dtype or dtype_of("cuda")
        init(self, device_type, dtype, *args, **kwargs)

    return __init__


def _scaler_on_cpu(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def __init__(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:  # noqa: N807
        init(self, _kind(device), *args, **kwargs)

    return __init__


def _function_on_cpu(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.amp.custom_fwd` and its like, which name a kind of device."""

    @functools.wraps(decorate)
    def translated(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return decorate(*args, device_type=_kind(device_type), **kwargs)

    return translated
