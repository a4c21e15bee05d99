"""Modules and mixed precision of CUDA, on the CPU."""

import collections.abc
import functools
import importlib.util
import math
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwright.after_import import after_import
from shardwright.comm.collectives.backend import normalised_over_ranks
from shardwright.cpu_mode import _private
from shardwright.cpu_mode.tensors import is_cuda, on_cpu, put, put_all, sent_to_cpu, with_argument


def put_in_force() -> None:
    module: Any = nn.Module
    put(module, "to", sent_to_cpu(module.to))
    wrapper: Any = nn.parallel.DistributedDataParallel
    # It refuses devices for a module on the CPU.
    for name in ("device_ids", "output_device"):
        wrapper.__init__ = with_argument(wrapper.__init__, name, lambda _: None)
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", _sharded_on_cpu)
    # FSDP waits for the stream of its device where it offloads, and that of the CPU has no such method.
    stream: Any = torch.cpu.Stream
    stream.synchronize = getattr(stream, "synchronize", _done)
    after_import("torch.distributed.fsdp._init_utils", _private.let_fsdp_broadcast_weights)
    after_import("torch.distributed.fsdp._flat_param", _private.let_fsdp_move_weights)
    after_import("torch.distributed.checkpoint.filesystem", _private.let_checkpoints_be_written)
    # `nn.DataParallel` asks for the kind of device to spread over, and finds none: see `_private`.


def _sharded_on_cpu(module: Any) -> None:
    """Has FSDP compute on the CPU where the script names a GPU."""
    wrapper = module.FullyShardedDataParallel
    # Also where none is named: FSDP would look for an accelerator.
    wrapper.__init__ = with_argument(
        wrapper.__init__, "device_id", lambda device: on_cpu(device or torch.device("cuda")), default=None
    )


def _done(stream: Any) -> None:
    """Waits for the work of a stream."""


def put_norms_in_force() -> None:
    if not dist.is_available():
        return
    cls: Any = nn.SyncBatchNorm
    cls.forward = _on_cpu(cls.forward)
    _private.let_ddp_take_synchronised_norms()


def _on_cpu(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def on_cpu(self: Any, input: Tensor) -> Tensor:
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        if not self.training or group is None or dist.get_world_size(group) == 1:
            return _private.PlainBatchNorm.forward(self, input)  # type: ignore[no-any-return]
        return normalised_over_ranks(self, input, group)

    return on_cpu


def put_loading_in_force() -> None:
    cls: Any = DataLoader
    cls.__init__ = with_argument(cls.__init__, "pin_memory", lambda _: False, without=("pin_memory_device",))


_SIX = "torch._six"
"""There until PyTorch 1.13: what differs between Python 2 and 3, and two numbers. Scripts for SMP bring
helpers along that import ``inf`` from it."""


def put_removed_in_force() -> None:
    """Has them imported again, where PyTorch lacks them."""
    if _SIX in sys.modules or importlib.util.find_spec(_SIX) is not None:
        return
    six = ModuleType(_SIX, "What Python 2 and 3 have in common.")
    six.__dict__.update(
        PY2=False,
        PY3=True,
        PY37=True,
        inf=math.inf,
        nan=math.nan,
        string_classes=(str, bytes),
        int_classes=int,
        container_abcs=collections.abc,
        istuple=lambda obj: isinstance(obj, tuple),
    )
    sys.modules[_SIX] = six
    torch._six = six  # type: ignore[attr-defined]


class _Own(threading.local):
    """The type for the CPU that the script has, while that for CUDA is in its place; else None.

    Threads have types of their own.
    """

    dtype: torch.dtype | None = None


_OWN = _Own()


def put_mixed_precision_in_force() -> None:
    scaler: Any = torch.amp.grad_scaler.GradScaler
    scaler.__init__ = with_argument(scaler.__init__, "device", _kind, default="cuda")
    amp: Any = torch.amp
    functions = {name: getattr(amp, name) for name in ("custom_fwd", "custom_bwd")}
    put_all({name: with_argument(each, "device_type", _kind) for name, each in functions.items()}, amp)
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

    whole = (is_autocast_enabled, set_autocast_enabled, get_autocast_dtype, set_autocast_dtype)
    return {
        **{function.__name__: function for function in whole},
        "get_autocast_gpu_dtype": lambda: get_autocast_dtype("cuda"),
        "set_autocast_gpu_dtype": lambda dtype, /: set_autocast_dtype("cuda", dtype),
        "get_autocast_cpu_dtype": lambda: get_autocast_dtype("cpu"),
        "set_autocast_cpu_dtype": lambda dtype, /: set_autocast_dtype("cpu", dtype),
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
