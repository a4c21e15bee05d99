"""The functions and classes of `torch.cuda`, for the CPU."""

import contextlib
import functools
import os
import platform
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.cluster.named import host_memory_bytes
from shardwright.cpu_mode import _private, device_memory, generators, streams
from shardwright.cpu_mode.devices import index_of
from shardwright.cpu_mode.replacement import put, put_all
from shardwright.errors import UsageError

__all__ = ["UNAVAILABLE", "put_in_force"]

# A device can do what this generation of GPUs can, as far as scripts decide by it: bfloat16, but no FP8.
_CAPABILITY = (8, 0)
# Some scripts ask for a version that knows bfloat16; gloo, which does the work, does.
_NCCL_VERSION = (2, 10, 3)

UNAVAILABLE = (
    "CUDAGraph CUDAPluggableAllocator GreenContext MemPool caching_allocator_alloc caching_allocator_delete "
    "change_current_allocator clock_rate current_blas_handle current_solver_handle get_stream_from_external "
    "graph graph_pool_handle list_gpu_processes make_graphed_callables power_draw temperature use_mem_pool"
).split()
"""What only a GPU has: a script that uses it gets an error that says so."""


def put_in_force(num_devices: int) -> None:
    """Replaces the functions."""
    cuda: Any = torch.cuda
    _private.leave_cuda_uninitialised()
    streams.put_in_force()
    put_all(_functions(num_devices), cuda)
    put_all(device_memory.FUNCTIONS, cuda, cuda.memory)
    put_all(generators.functions(num_devices), cuda, cuda.random)
    put_all({name: getattr(cuda, name) for name in ("Event", "ExternalStream", "Stream")}, cuda.streams)
    put_all({"is_current_stream_capturing": lambda: False}, cuda.graphs)
    put_all({"version": lambda: _NCCL_VERSION}, cuda.nccl)
    put_all(_nvtx(), cuda.nvtx)
    put_all({"profile": contextlib.nullcontext, "start": _nothing, "stop": _nothing}, cuda.profiler)
    # What is compiled waits here for CUDA.
    put_all({"synchronize": _nothing}, torch.accelerator)
    for name in UNAVAILABLE:
        if (original := getattr(cuda, name, None)) is not None:
            put(cuda, name, _unavailable(name, is_class=isinstance(original, type)))
    cuda.default_generators = (torch.default_generator,) * num_devices
    for name in [name for name in cuda.__all__ if name.endswith(("Tensor", "Storage"))]:
        if hasattr(torch, name):
            setattr(cuda, name, getattr(torch, name))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What work on the CPU does not need."""


def _unavailable(name: str, *, is_class: bool) -> Callable[..., Any]:
    """What refuses to be called; a class for a class, which may stand in annotations."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"this script uses torch.cuda.{name}, which needs a GPU; CPU mode (--device cpu) has nothing to "
            "stand for it. Leave it out of a run on the CPU."
        )

    if is_class:
        return type(name, (), {"__new__": refuse, "__module__": torch.cuda.__name__})
    return refuse


def _functions(num_devices: int) -> dict[str, Any]:
    return {
        **_devices(num_devices),
        **_streams(),
        "can_device_access_peer": lambda device, peer_device: False,
        "check_error": _nothing,
        "cudart": _Runtime,
        "get_arch_list": list,
        "get_gencode_flags": lambda: "",
        "get_sync_debug_mode": lambda: 0,
        "init": _nothing,
        "ipc_collect": _nothing,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_initialized": lambda: True,
        "is_tf32_supported": lambda: False,
        "memory_usage": lambda device=None: 0,
        "set_sync_debug_mode": _nothing,
        "synchronize": _nothing,
        "utilization": lambda device=None: 0,
        "caching_allocator_disabled": contextlib.nullcontext,
        "caching_allocator_enable": _nothing,
        "host_memory_stats": dict,
        "host_memory_stats_as_nested_dict": dict,
        "memory_stats_as_nested_dict": dict,
    }


def _devices(num_devices: int) -> dict[str, Any]:
    current = streams.CURRENT

    def set_device(device: Any) -> None:
        current.device = index_of(device, current=current.device)

    return {
        "current_device": lambda: current.device,
        "device": _DeviceContext,
        "device_count": lambda: num_devices,
        "device_of": _DeviceOf,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_name": lambda device=None: _name(),
        "get_device_properties": lambda device=None: _properties(),
        "set_device": set_device,
    }


def _streams() -> dict[str, Any]:
    return {
        "Event": streams.Event,
        "ExternalStream": streams.ExternalStream,
        "Stream": streams.Stream,
        "StreamContext": streams.StreamContext,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "is_current_stream_capturing": lambda: False,
        "set_stream": streams.set_stream,
        "stream": streams.StreamContext,
    }


class _DeviceContext:
    """Makes a device the current one; for `torch.cuda.device`."""

    def __init__(self, device: Any):
        self.idx = index_of(device, current=streams.CURRENT.device)

    def __enter__(self) -> None:
        self.prev_idx, streams.CURRENT.device = streams.CURRENT.device, self.idx

    def __exit__(self, *exc_info: object) -> None:
        streams.CURRENT.device = self.prev_idx


class _DeviceOf(_DeviceContext):
    """Stays on the current device, where all tensors are; for `torch.cuda.device_of`."""

    def __init__(self, obj: Tensor):
        super().__init__(None)


class _Runtime:
    """What profilers call of the CUDA runtime; for `torch.cuda.cudart`."""

    def cudaProfilerStart(self) -> int:  # noqa: N802
        """Begins nothing: there are no kernels to record."""
        return 0

    def cudaProfilerStop(self) -> int:  # noqa: N802
        """Ends it."""
        return 0

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:  # noqa: N802
        """Bytes that are free, and all."""
        return device_memory.mem_get_info()


@functools.cache
def _name() -> str:
    return f"CPU mode ({platform.machine()})"


@functools.cache
def _properties() -> types.SimpleNamespace:
    major, minor = _CAPABILITY
    return types.SimpleNamespace(
        name=_name(),
        major=major,
        minor=minor,
        total_memory=host_memory_bytes(),
        multi_processor_count=os.cpu_count() or 1,
        is_integrated=1,
        is_multi_gpu_board=0,
        warp_size=32,
        gcnArchName="",
    )


def _nvtx() -> dict[str, Any]:
    @contextlib.contextmanager
    def named_range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    return {
        "mark": _nothing,
        "range": named_range,
        "range_end": _nothing,
        "range_pop": lambda: 0,
        "range_push": lambda msg: 0,
        "range_start": lambda msg: 0,
    }
