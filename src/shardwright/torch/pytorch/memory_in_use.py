"""Measures the memory that this process uses now."""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

__all__ = ["memory_in_use"]


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
