"""Reads untrusted files of a checkpoint: regular ones only, JSON with limits, errors told apart.

A file that the disk cannot return is damaged. But a process with too many open files, or without permission
to read, learns nothing about the checkpoint: skipping it, or setting it aside, would lose a sound one.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.files import no_name_twice

# Room for the lists of files of 100,000 ranks, and not for what fills the memory.
_MOST_BYTES = 64 * 2**20


def open_regular(path: Path) -> BinaryIO:
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
    with open_regular(path) as file:
        size = size_of(file)
        if size > most_bytes:
            raise CorruptCheckpointError(f"{path} has {size} bytes, and at most {most_bytes} are read.")
        return file.read(size)


def size_of(file: BinaryIO) -> int:
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


_DEEPEST = 64


def parse(content: bytes, *, name: str) -> Any:
    """Reads a document.

    >>> parse(b'{"step": 3}', name="state.json")
    {'step': 3}
    """
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=no_name_twice)
    except RecursionError as error:
        raise _too_deep(name) from error
    except (UnicodeDecodeError, ValueError) as error:
        raise CorruptCheckpointError(f"{name} is no JSON: {error}. Nothing was loaded.") from error
    _refuse_deep(found, name)
    return found


def _refuse_deep(document: Any, name: str) -> None:
    """Goes through it level by level: whoever uses it may recurse, and here nothing does."""
    level = [document] if type(document) in (dict, list) else []
    for _ in range(_DEEPEST + 1):
        if not level:
            return
        inside = (each.values() if type(each) is dict else each for each in level)
        level = [each for values in inside for each in values if type(each) is dict or type(each) is list]
    raise _too_deep(name)


def _too_deep(name: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{name} is nested more than {_DEEPEST} deep. Nothing was loaded.")


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
