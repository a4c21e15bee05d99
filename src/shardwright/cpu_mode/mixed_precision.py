"""Mixed precision: CUDA autocast and scalers become the CPU's, with CUDA's default types."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from shardwright.cpu_mode import _private
from shardwright.cpu_mode.replacement import is_cuda, put_all


class _Own(threading.local):
    """The type for the CPU that the script has, while that for CUDA is in its place; else None.

    Threads have types of their own.
    """

    dtype: torch.dtype | None = None


_OWN = _Own()


def put_in_force() -> None:
    scaler: Any = torch.amp.grad_scaler.GradScaler
    scaler.__init__ = _scaler_on_cpu(scaler.__init__)
    amp: Any = torch.amp
    put_all({name: _function_on_cpu(getattr(amp, name)) for name in ("custom_fwd", "custom_bwd")}, amp)
    _restore_types_on_leaving(torch.autocast)
    put_all(_state(), _private.CORE, torch)


def _state() -> dict[str, Callable[..., Any]]:
    """The functions that ask and say whether there is mixed precision, and of what type."""
    core = _private.CORE
    is_enabled, set_enabled = core.is_autocast_enabled, core.set_autocast_enabled
    dtype_of, set_dtype = core.get_autocast_dtype, core.set_autocast_dtype

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_enabled(_kind(device_type))  # type: ignore[no-any-return]

    def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
        given = ("cuda", *args) if len(args) + len(kwargs) == 1 else args
        set_enabled_of(*given, **kwargs)

    def set_enabled_of(device_type: str, enabled: bool) -> None:
        set_enabled(_kind(device_type), enabled)
        if is_cuda(device_type) and enabled:
            _OWN.dtype = _OWN.dtype or dtype_of("cpu")
            set_dtype("cpu", dtype_of("cuda"))
        elif not enabled and _OWN.dtype is not None:
            set_dtype("cpu", _OWN.dtype)
            _OWN.dtype = None

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        if device_type == "cpu" and _OWN.dtype is not None:
            return _OWN.dtype
        in_force = is_cuda(device_type) and is_enabled("cpu")
        return dtype_of("cpu" if in_force else device_type)  # type: ignore[no-any-return]

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        if device_type == "cpu" and _OWN.dtype is not None:
            _OWN.dtype = dtype  # that for CUDA stays in its place
            return
        set_dtype(device_type, dtype)
        if is_cuda(device_type) and is_enabled("cpu"):
            set_dtype("cpu", dtype)

    def get_autocast_gpu_dtype() -> torch.dtype:
        return get_autocast_dtype("cuda")

    def set_autocast_gpu_dtype(dtype: torch.dtype, /) -> None:
        set_autocast_dtype("cuda", dtype)

    def get_autocast_cpu_dtype() -> torch.dtype:
        return get_autocast_dtype("cpu")

    def set_autocast_cpu_dtype(dtype: torch.dtype, /) -> None:
        set_autocast_dtype("cpu", dtype)

    return {
        f.__name__: f
        for f in (
            is_autocast_enabled,
            set_autocast_enabled,
            get_autocast_dtype,
            set_autocast_dtype,
            get_autocast_gpu_dtype,
            set_autocast_gpu_dtype,
            get_autocast_cpu_dtype,
            set_autocast_cpu_dtype,
        )
    }


def _restore_types_on_leaving(autocast: Any) -> None:
    """Has ``with torch.autocast("cuda"):`` leave the types that it has found, or that the script sets inside.

    PyTorch asks for the type for CUDA when it enters, and sets it when it leaves. Inside of
    ``with torch.autocast("cpu"):`` it is told the one in force, which would stay the type for CUDA. And where
    the type for CUDA is in the place of that for the CPU, a block for the CPU takes the place itself.
    """
    dtype_of, set_dtype = _private.CORE.get_autocast_dtype, _private.CORE.set_autocast_dtype
    enter, leave = autocast.__enter__, autocast.__exit__

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:  # noqa: N807
        self._types_before = _OWN.dtype, dtype_of("cpu"), dtype_of("cuda")
        if self.device == "cpu":
            _OWN.dtype = None
        return enter(self)

    @functools.wraps(leave)
    def __exit__(self: Any, *exc_info: Any) -> Any:  # noqa: N807
        own_before, in_force, of_cuda = self._types_before
        own = _OWN.dtype or dtype_of("cpu")
        result = leave(self, *exc_info)
        if is_cuda(self.device):
            set_dtype("cuda", of_cuda)
        else:  # what the script has set inside is taken back, as by PyTorch
            own = own_before or in_force
        _OWN.dtype = None if own_before is None else own
        set_dtype("cpu", own if own_before is None else in_force)
        return result

    autocast.__enter__, autocast.__exit__ = __enter__, __exit__


def _kind(device_type: str) -> str:
    return "cpu" if is_cuda(device_type) else device_type


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
