"""Device memory: this process's memory as that of tensors, the host's as that of the GPU."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from shardwright.cluster.named import host_memory_bytes

__all__ = ["FUNCTIONS", "mem_get_info"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def memory_allocated(device: Any = None) -> int:
    """Bytes that this process has in memory."""
    return _status_bytes("VmRSS") or _peak_of_life_bytes()


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that this process had in memory, since `reset_peak_memory_stats` where Linux lets us."""
    return _status_bytes("VmHWM") or _peak_of_life_bytes()


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


def _peak_of_life_bytes() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _nothing(*args: Any, **kwargs: Any) -> None:
    """There is no allocator to tell."""


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
