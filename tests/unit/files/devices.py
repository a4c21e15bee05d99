"""A device to write to, which may break: never the machine's own."""

import os
import stat
from pathlib import Path

__all__ = ["device"]

_FULL = os.makedev(1, 7)


def device(path: Path) -> None:
    """Makes a device like ``/dev/full``; who may make none may replace none either, and gets a link to it."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, _FULL)
    except PermissionError:
        path.symlink_to("/dev/full")
