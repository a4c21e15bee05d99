"""Every disk operation of a checkpoint, in one place; a folder made whole or not at all.

Tests kill the process, or fill the disk, at each of these operations: see
``tests/unit/checkpoint/test_torn.py``.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO

from shardwright.checkpoint.manifest import FileEntry
from shardwright.errors import CheckpointError
from shardwright.quantities import counted

# Bytes that are hashed and written at a time.
_CHUNK = 4 * 2**20


class NewFile:
    """A file that is being written from its beginning to its end."""

    def __init__(self, file: IO[bytes], *, before: Callable[[], None]):
        self._file = file
        self._before = before
        self._digest = sha256()
        self.size = 0
        self.problem: OSError | None = None

    @property
    def sha256(self) -> str:
        """The SHA-256 of all that was written so far, in hexadecimal digits."""
        return self._digest.hexdigest()

    def write(self, part: bytes | memoryview) -> int:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            self._digest.update(chunk)
            try:
                self._before()
                _write_all(self._file, chunk)
            except OSError as error:
                self.problem = error
                raise
            self.size += len(chunk)
        return len(view)

    def flush(self) -> None:
        """Does nothing: the system already has what was written."""


class Disk:
    """Writes files and folders so that they outlive a loss of power."""

    def __init__(self, before: Callable[[str, Path], None] = lambda operation, path: None):
        self._before = before

    def make_folder(self, path: Path) -> None:
        """Makes a new folder, and any around it."""
        self._before("mkdir", path)
        missing = [path]
        while not missing[-1].parent.is_dir():
            missing.append(missing[-1].parent)
        path.mkdir(parents=True)
        for made in reversed(missing):
            self.sync_folder(made.parent)

    def write(self, path: Path, content: Iterable[bytes | memoryview]) -> FileEntry:
        """Writes a new file; its content has reached the disk when this returns."""

        def save(file: "NewFile") -> None:
            for part in content:
                file.write(part)

        return self.write_with(path, save)

    def write_with(self, path: Path, save: "Callable[[NewFile], object]") -> FileEntry:
        """Writes a new file by a function that writes to a file; as `write` otherwise."""
        self._before("create", path)
        with path.open("xb", buffering=0) as file:
            made = NewFile(file, before=lambda: self._before("write", path))
            try:
                save(made)
            except Exception:
                if made.problem is not None:  # what torch.save makes of it does not say that the disk is full
                    raise made.problem from None
                raise
            self._before("fsync", path)
            os.fsync(file.fileno())
        return FileEntry(size=made.size, sha256=made.sha256)

    def replace(self, path: Path, content: bytes) -> None:
        """Gives a file new content: readers find the old or the new one, never a part."""
        fresh = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        fresh.unlink(missing_ok=True)
        self.write(fresh, [content])
        self.rename(fresh, path)

    def rename(self, path: Path, target: Path) -> None:
        """Gives a file or folder another name in its folder, for good."""
        self._before("rename", path)
        path.rename(target)
        self.sync_folder(target.parent)

    def link(self, path: Path, other: Path) -> None:
        """Gives a file a second name in its folder, for good."""
        self._before("link", path)
        os.link(path, other)
        self.sync_folder(other.parent)

    def sync_folder(self, path: Path) -> None:
        """Has the names in a folder reach the disk."""
        self._before("fsync", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_file(self, path: Path) -> None:
        self._before("remove", path)
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        self._before("remove", path)
        shutil.rmtree(path)


def _write_all(file: IO[bytes], chunk: memoryview) -> None:
    while len(chunk):
        written = file.write(chunk)
        chunk = chunk[written:]


@contextmanager
def fresh_folder(target: Path, *, disk: Disk) -> Iterator[Path]:
    """Gives a temporary folder beside a folder, whose name it gets when all was written."""
    target = target.resolve()
    refuse_filled(target)
    draft = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        disk.make_folder(draft)
        yield draft
        disk.sync_folder(draft)
        disk.rename(draft, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}. Nothing was left there. Give a folder "
            "on a disk that can be written and has room."
        ) from error
    finally:
        if draft.is_dir():
            with contextlib.suppress(OSError):
                disk.remove_folder(draft)


def refuse_filled(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is there already, and is no folder. Give the name of a new folder.")
    found = sorted(path.name for path in target.iterdir())
    if found:
        raise CheckpointError(
            f"{target} is there already, with {counted(len(found), 'file')} ({', '.join(found[:3])}"
            f"{', ...' if len(found) > 3 else ''}). Nothing is written over: give the name of a new folder."
        )
