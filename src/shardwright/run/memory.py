"""Memory and cores of this process: what it uses, the C heap's, which is kept, and cores of its own.

A microbatch's activations are freed as soon as its backward ends, and the next microbatch allocates as much
again. By default glibc returns memory at the end of its heap to the system each time, and the system clears
every page before it hands it out again: 12000 page faults in a step of a small GPT. GPUs have PyTorch's
caching allocator for this.

Ranks on CPUs wait for one another and so wake up often, and the kernel likes to place a waking thread next to
the one that woke it. Two ranks then share a core for milliseconds while another core is idle::

    core 0   rank 0 ▇▇▇▇ waits                   ▇▇▇▇▇▇▇▇
    core 1   rank 1 ▇▇▇▇▇▇▇▇▇▇▇▇ sends ▚▚▚▚▚▚▚▚▚ ▇▇▇▇▇▇▇▇
                                       rank 0 woke up here
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shardwright.comm._private import uses_gpus
from shardwright.quantities import peak_of_process
from shardwright.run.context import Context

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
    return peak_of_process()


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


class OwnCores:
    """Cores that no other rank of this host computes on, if there are enough."""

    def __init__(self, context: Context):
        self._all = _allowed()
        self._cores: set[int] = set()
        if context.device.type == "cpu":
            self._cores = share_of(
                self._all,
                local_rank=context.local_rank,
                local_size=context.local_size,
                num_threads=torch.get_num_threads(),
            )

    def in_force(self) -> AbstractContextManager[None]:
        """Keeps the calling thread on these cores; leaves it where it is if it was moved by somebody else.

        What is started outside, such as the workers of a data loader, is free to run anywhere.
        """
        return self._kept() if self._cores and _allowed() == self._all else nullcontext()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        os.sched_setaffinity(0, self._cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._all)


def share_of(cores: set[int], *, local_rank: int, local_size: int, num_threads: int) -> set[int]:
    """The share of one of several ranks; nothing where there are not enough cores for all, or one rank only.

    >>> share_of({0, 1, 2, 3}, local_rank=1, local_size=2, num_threads=2)
    {2, 3}
    >>> share_of({0, 1}, local_rank=1, local_size=4, num_threads=1)
    set()
    """
    each = len(cores) // local_size
    if local_size == 1 or each < num_threads:
        return set()
    return set(sorted(cores)[local_rank * each : (local_rank + 1) * each])


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
