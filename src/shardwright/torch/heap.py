"""The C library's heap: memory of a microbatch is kept for the next one.

The activations of a microbatch are freed as soon as its backward ends, and the next microbatch takes as much
again. By default glibc gives memory at the end of its heap back to the system each time, and the system
clears every page before it gives it out anew: 12000 page faults in a step of a small GPT. GPUs have PyTorch's
caching allocator for this.
"""

import ctypes
import sys

__all__ = ["keep_freed_memory"]

# From malloc.h. A threshold that is set no longer adapts itself, so both are needed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
# The largest that glibc accepts; a larger block is always given back.
_LARGEST_KEPT = 32 * 2**20


def keep_freed_memory() -> bool:
    """Has the heap keep what is freed, up to the peak of this process; False where it cannot be told."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # another C library
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
