"""Opens untrusted paths only if they are regular files: no link elsewhere, no device, no pipe."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from shardwright.errors import CorruptCheckpointError

__all__ = ["open_regular", "read_regular", "size_of"]

# Room for the lists of files of 100,000 ranks, and not for what fills the memory.
_MOST_BYTES = 64 * 2**20


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to be read."""
    _refuse_others(path, _status(path))  # before it is opened: that alone does things to some devices
    try:
        # Another one may be there by now. NONBLOCK: opening a pipe would wait for who writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from error
        raise
    try:
        _refuse_others(path, os.fstat(descriptor))
    except CorruptCheckpointError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Reads a file."""
    with open_regular(path) as file:
        size = size_of(file)
        if size > most_bytes:
            raise CorruptCheckpointError(f"{path} has {size} bytes, and at most {most_bytes} are read.")
        return file.read(size)


def size_of(file: BinaryIO) -> int:
    """Bytes in an open file."""
    return os.fstat(file.fileno()).st_size


def _status(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{path} is missing.") from error


def _refuse_others(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _is_link(path)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError(f"{path} is no regular file.")


def _is_link(path: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} is a link. Checkpoints have none; nothing was read.")
