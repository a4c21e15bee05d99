"""Memory of this process: what it uses, and the C heap's, which is kept from one microbatch for the next.

A microbatch's activations are freed as soon as its backward ends, and the next microbatch allocates as much
again. By default glibc returns memory at the end of its heap to the system each time, and the system clears
every page before it hands it out again: 12000 page faults in a step of a small GPT. GPUs have PyTorch's
caching allocator for this.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.comm._private import uses_gpus

# From malloc.h. A threshold that is set no longer adapts itself, so both are needed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
# A larger block is always given back; glibc before 2.35 accepts no more than the second.
_LARGEST_KEPT = (2**30, 32 * 2**20)
_LARGEST_BY_DEFAULT = 32 * 2**20
_LARGE = 2**20


def keep_freed_memory() -> bool:
    """Has the heap keep what is freed from now on; False where it cannot be told."""
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    kept = any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST_KEPT)
    return kept and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def give_back_freed_memory() -> None:
    """Gives back once what is free now, such as weights that belong to other ranks."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def large_blocks_given_back(*, then_kept: bool) -> Iterator[None]:
    """Has large blocks go back to the system when they are freed, as long as this lasts.

    For many large tensors of which parts stay: a small block that is put into the gap of one makes it useless
    for the next, and the heap grows for each.
    """
    mallopt = _function("mallopt")
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        any(
            mallopt(_MMAP_THRESHOLD, size)
            for size in (_LARGEST_KEPT if then_kept else (_LARGEST_BY_DEFAULT,))
        )


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
    function: Callable[[], _Mallinfo] | None = _function("mallinfo2")
    if function is not None:
        function.restype = _Mallinfo  # type: ignore[attr-defined]
    return function


def _function(name: str) -> Any:
    """A function of glibc; None where there is another C library, or an older one."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
