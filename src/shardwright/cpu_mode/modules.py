"""Modules: a move to CUDA leaves them in place; wrappers for GPUs keep them on the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwright.after_import import after_import
from shardwright.cpu_mode import _private
from shardwright.cpu_mode.devices import on_cpu
from shardwright.cpu_mode.replacement import put
from shardwright.cpu_mode.tensors import sent_to_cpu

__all__ = ["put_in_force"]


def put_in_force() -> None:
    """Replaces the methods."""
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
