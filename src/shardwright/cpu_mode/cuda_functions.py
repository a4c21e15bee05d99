"""The functions and classes of `torch.cuda`, for the CPU: memory and random generators among them.

The CPU's generator stands for that of every CUDA device, so a script that seeds both, saves both, or seeds
only CUDA draws the same numbers in each run. There is one sequence where a GPU would have a second.
"""

import contextlib
import functools
import os
import platform
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.cluster.named import host_memory_bytes
from shardwright.cpu_mode import _private, streams
from shardwright.cpu_mode.tensors import index_of, put, put_all
from shardwright.errors import UsageError
from shardwright.quantities import peak_of_process

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def memory_allocated(device: Any = None) -> int:
    """Bytes that this process has in memory."""
    return _status_bytes("VmRSS") or peak_of_process()


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that this process had in memory, since `reset_peak_memory_stats` where Linux lets us."""
    return _status_bytes("VmHWM") or peak_of_process()


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begins to look for the largest number of bytes anew."""
    with contextlib.suppress(OSError):  # not on Linux, or not allowed: the peak is that of the process's life
        _CLEAR.write_text("5")


def memory_stats(device: Any = None) -> dict[str, Any]:
    """The numbers that scripts look up most, under PyTorch's names."""
    now, peak = memory_allocated(), max_memory_allocated()
    stats: dict[str, Any] = {"num_alloc_retries": 0, "num_ooms": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats |= {f"{kind}.all.current": now, f"{kind}.all.peak": peak}
    return stats


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The same as a text."""
    now, peak = memory_allocated() / 2**20, max_memory_allocated() / 2**20
    return f"CPU mode: this process has {now:.1f} MiB in memory, at most {peak:.1f} MiB"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes of the host's memory that are free, and all of them."""
    total = host_memory_bytes()
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = total - memory_allocated()
    return min(free, total), total


def _status_bytes(name: str) -> int:
    """A line of this process's status; 0 where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    found = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")
    return int(found) * 1024


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What work on the CPU does not need."""


FUNCTIONS = {
    "device_memory_used": memory_allocated,
    "empty_cache": _nothing,
    "get_allocator_backend": lambda: "native",
    "get_per_process_memory_fraction": lambda device=None: 1.0,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_cached": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "mem_get_info": mem_get_info,
    "memory_allocated": memory_allocated,
    "memory_cached": memory_allocated,
    "memory_reserved": memory_allocated,
    "memory_snapshot": lambda mempool_id=None, include_traces=True: [],
    "memory_stats": memory_stats,
    "memory_summary": memory_summary,
    "reset_accumulated_host_memory_stats": _nothing,
    "reset_accumulated_memory_stats": _nothing,
    "reset_max_memory_allocated": reset_peak_memory_stats,
    "reset_max_memory_cached": reset_peak_memory_stats,
    "reset_peak_host_memory_stats": _nothing,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "set_per_process_memory_fraction": _nothing,
}
"""What stands for functions of `torch.cuda` and `torch.cuda.memory`."""


def functions(num_devices: int) -> dict[str, Any]:
    """Replacements for functions of `torch.cuda` and `torch.cuda.random`."""
    generator = torch.default_generator

    def get_rng_state(device: Any = "cuda") -> Tensor:
        return generator.get_state()

    def get_rng_state_all() -> list[Tensor]:
        return [generator.get_state() for _ in range(num_devices)]

    def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
        for state in list(new_states)[:1]:
            generator.set_state(state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def seed() -> None:
        generator.seed()

    def initial_seed() -> int:
        return generator.initial_seed()

    return {
        "get_rng_state": get_rng_state,
        "get_rng_state_all": get_rng_state_all,
        "initial_seed": initial_seed,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": seed,
        "seed_all": seed,
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
    }


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
    cuda: Any = torch.cuda
    _private.leave_cuda_uninitialised()
    streams.put_in_force()
    put_all(_functions(num_devices), cuda)
    put_all(FUNCTIONS, cuda, cuda.memory)
    put_all(functions(num_devices), cuda, cuda.random)
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
        return 0

    def cudaProfilerStop(self) -> int:  # noqa: N802
        return 0

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:  # noqa: N802
        return mem_get_info()


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
