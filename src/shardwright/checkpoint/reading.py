"""Tells system errors of a file from those of the process that reads it.

A file that the disk cannot return is damaged. But a process with too many open files, or without permission
to read, learns nothing about the checkpoint: skipping it, or setting it aside, would lose a sound one.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.errors import CheckpointError, CorruptCheckpointError

__all__ = ["reading"]

_TOO_MANY_FILES = "Raise the limit (ulimit -n), or end what has so many files open"
_NOT_ALLOWED = "Give this user the right to read it, or be the one who has saved it"
_REMEDIES = {
    errno.EMFILE: _TOO_MANY_FILES,
    errno.ENFILE: _TOO_MANY_FILES,
    errno.ENOMEM: "Free memory, or raise the limit (ulimit -v)",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    **dict.fromkeys(
        (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EAGAIN, errno.ENOLCK),
        "See whether the machine that has the disk answers",
    ),
}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Has errors of the system say whether a checkpoint is damaged."""
    try:
        yield
    except OSError as error:
        name, reason = error.filename or path, error.strerror or error
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise CorruptCheckpointError(f"{name} cannot be read: {reason}.") from error
        raise CheckpointError(
            f"{name} could not be read: {reason}. The reason is not the checkpoint, which "
            f"may be whole. {remedy}, and try again."
        ) from error
