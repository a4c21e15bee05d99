"""The memory of the current host, or its container's share of it."""

import os
from pathlib import Path

__all__ = ["host_memory_bytes"]

# Of cgroups, version 2 and 1; in a container, its own.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory_bytes(limits: tuple[str, ...] = _LIMITS) -> int:
    """Bytes that the processes of this host, or container, may use together; 0: not known."""
    try:
        known = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    for path in limits:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdecimal():  # without a limit: max, or a number beyond all memory
            known = min(known, int(text))
    return known
