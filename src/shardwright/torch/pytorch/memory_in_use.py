"""Measures the memory that this process uses now, and the most that it has used."""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

from shardwright.comm.identity.devices_in_use import uses_gpus

__all__ = ["memory_in_use", "peak_memory"]


class _Mallinfo(ctypes.Structure):
    """The result of glibc's ``mallinfo2``, in bytes, as malloc.h declares it."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def memory_in_use(device: torch.device) -> int:
    """Bytes of the tensors on a GPU; on a CPU, of all that is taken from the C library's heap; 0: not known.

    The resident set would not do: the heap keeps what is freed.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    mallinfo = _mallinfo2()
    if mallinfo is None:
        return 0
    info = mallinfo()
    return int(info.uordblks) + int(info.hblkhd)


def peak_memory() -> int:
    """The most bytes so far: of the GPU where there is one, else of the resident set; 0: not known."""
    if uses_gpus():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo] | None:
    """The function of glibc, since 2.33; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    function.restype = _Mallinfo
    return function
