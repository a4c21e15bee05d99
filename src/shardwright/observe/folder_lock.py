"""Keeps two runs from writing into one folder at the same time.

The kernel releases this file lock when the process ends, however it ends: nothing is left to clean up by
hand. A child does not inherit it.
"""

import atexit
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shardwright.files import open_to_append
from shardwright.printable import printable

__all__ = ["held", "hold", "release"]

log = logging.getLogger(__name__)

_HELD: dict[Path, IO[bytes]] = {}
_LONGEST_HOLDER = 300


def hold(path: Path) -> str | None:
    """Holds a lock file until this process ends."""
    if path in _HELD:
        return None
    file = open_to_append(path)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            log.warning("%s cannot be locked (%s): nothing keeps other runs out", path, error.strerror)
            _HELD[path] = file
            return None
        file.seek(0)
        holder = printable(file.read(_LONGEST_HOLDER).decode(errors="replace").strip())
        file.close()
        return holder or "another process"
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    _HELD[path] = file
    return None


def release(path: Path) -> None:
    """Lets others hold a lock file; nothing where this process does not hold it."""
    file = _HELD.pop(path, None)
    if file is not None:
        file.close()


@contextmanager
def held(path: Path) -> Iterator[str | None]:
    """Holds a lock file for a while; one that this process has held before, it goes on holding."""
    goes_on = path in _HELD
    holder = hold(path)
    try:
        yield holder
    finally:
        if holder is None and not goes_on:
            release(path)


@atexit.register
def _close() -> None:
    """Closes the files, which Python would otherwise complain about."""
    while _HELD:
        _HELD.popitem()[1].close()
