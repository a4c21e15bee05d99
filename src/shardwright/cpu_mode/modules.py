"""Modules: moves to CUDA leave them in place; norms over ranks, loaders, and modules of earlier years."""

import collections.abc
import functools
import importlib.util
import inspect
import math
import sys
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
from shardwright.cpu_mode.replacement import on_cpu, put
from shardwright.cpu_mode.tensors import sent_to_cpu


def put_in_force() -> None:
    module: Any = nn.Module
    put(module, "to", sent_to_cpu(module.to))
    wrapper: Any = nn.parallel.DistributedDataParallel
    wrapper.__init__ = _without_devices(wrapper.__init__)
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
    init = wrapper.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        # Also where none is named: FSDP would look for an accelerator.
        kwargs["device_id"] = on_cpu(kwargs.get("device_id") or torch.device("cuda"))
        init(self, *args, **kwargs)

    wrapper.__init__ = __init__


def _done(stream: Any) -> None:
    """Waits for the work of a stream."""


def _without_devices(init: Callable[..., Any]) -> Callable[..., Any]:
    """For `DistributedDataParallel`, which refuses devices for a module on the CPU."""

    @functools.wraps(init)
    def __init__(  # noqa: N807
        self: Any,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        init(self, module, None, None, *args, **kwargs)

    return __init__


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
    cls.__init__ = _unpinned(cls.__init__)


def _unpinned(init: Callable[..., Any]) -> Callable[..., Any]:
    position = list(inspect.signature(init).parameters).index("pin_memory")

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if len(args) >= position:  # self is not among them
            args = (*args[: position - 1], False, *args[position:])
        kwargs.pop("pin_memory", None)
        kwargs.pop("pin_memory_device", None)
        init(self, *args, **kwargs)

    return __init__


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
