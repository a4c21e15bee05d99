"""The cores of the current host."""

import os

__all__ = ["cores_of_host"]


def cores_of_host() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
