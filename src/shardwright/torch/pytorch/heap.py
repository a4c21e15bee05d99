"""Keeps the C heap's memory of one microbatch for the next.

A microbatch's activations are freed as soon as its backward ends, and the next microbatch allocates as much
again. By default glibc returns memory at the end of its heap to the system each time, and the system clears
every page before it hands it out again: 12000 page faults in a step of a small GPT. GPUs have PyTorch's
caching allocator for this.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["give_back_freed_memory", "keep_freed_memory", "large_blocks_given_back"]

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


def _function(name: str) -> Any:
    """A function of glibc; None where there is another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
