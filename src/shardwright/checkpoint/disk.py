"""Every disk operation of a checkpoint, in one place, and its manifest: a folder made whole or not at all.

Tests kill the process, or fill the disk, at each of these operations: see
``tests/unit/checkpoint/test_torn.py``.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator

from shardwright import __version__
from shardwright.checkpoint.safe_files import open_regular, parse, size_of
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.problems import describe, join
from shardwright.quantities import counted

FORMAT_VERSION: Final = 1
MANIFEST = "manifest.json"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Record(BaseModel):
    """Part of a file of a checkpoint. Frozen; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    newest: ClassVar[int] = FORMAT_VERSION
    """The version that is written."""

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str) -> Self:
        return cls.from_content(parse(content, name=name), name=name)

    @classmethod
    def from_content(cls, found: Any, *, name: str) -> Self:
        version = found.get("version") if isinstance(found, dict) else None
        if type(version) is int and version > cls.newest:
            raise CorruptCheckpointError(
                f"{name} is of version {version} of the format, and this Shardwright ({__version__}) reads "
                f"version {cls.newest}. Use the Shardwright that saved it, or a newer one."
            )
        try:
            return cls.model_validate_json(json.dumps(found))
        except ValidationError as error:
            problems = describe(error.errors(include_url=False), root=name)
            raise CorruptCheckpointError(join(f"{name} cannot be used:", problems)) from error

    def to_bytes(self) -> bytes:
        return self.model_dump_json(indent=1, exclude_none=True).encode() + b"\n"


class FileEntry(Record):
    size: NonNegativeInt
    sha256: Sha256


class Manifest(Record):
    """The list of a checkpoint's files.

    Attributes:
        files: by name, every file but this one.
        not_finite: weights that have infinities or NaN, by their names in the model, as far as the save has
            looked; missing where there are none.
        sha256: of the manifest itself without this field, see `sealed`; those of version 1 have none.
    """

    newest: ClassVar[int] = 2

    format: Literal["shardwright checkpoint"] = "shardwright checkpoint"
    version: Literal[1, 2] = 2
    step: NonNegativeInt
    saved_by: str = __version__
    files: dict[str, FileEntry]
    not_finite: tuple[str, ...] | None = None
    sha256: Sha256 | None = None

    def sealed(self) -> "Manifest":
        """The same with its own checksum: no flipped byte in it goes unnoticed."""
        bare = self.model_copy(update={"sha256": None})
        return self.model_copy(update={"sha256": sha256(bare.to_bytes()).hexdigest()})

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str) -> Self:
        found = super().from_bytes(content, name=name)
        sealed = found.version > 1 or found.sha256 is not None
        if sealed and (found.sealed() != found or content != found.to_bytes()):
            raise CorruptCheckpointError(f"{name} is damaged: its checksum does not fit what it says.")
        return found

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: Mapping[str, Any]) -> Any:
        for name in files:
            if not is_plain_name(name) or name == MANIFEST:
                raise ValueError(f"{name!r} is no name of a file of a checkpoint")
        return files

    def check(self, folder: Path, *, share: tuple[int, int] = (0, 1)) -> None:
        present = {path.name for path in folder.iterdir()} - {MANIFEST}
        for name in sorted(present - set(self.files)):
            raise CorruptCheckpointError(
                f"{folder / name} does not belong to the checkpoint: {MANIFEST} does not list it."
            )
        first, num = share
        for name in sorted(self.files)[first::num]:
            _check_file(folder / name, self.files[name])


def is_plain_name(name: str) -> bool:
    """Whether it names a file in the folder itself, and no other.

    >>> is_plain_name("rank-00000.safetensors"), is_plain_name("../other")
    (True, False)
    """
    return _PLAIN.fullmatch(name) is not None


def _check_file(path: Path, entry: FileEntry) -> None:
    digest = sha256()
    with open_regular(path) as file:
        size = size_of(file)
        if size != entry.size:
            raise CorruptCheckpointError(f"{path} has {size} bytes, and was saved with {entry.size}.")
        part = memoryview(bytearray(2**20))  # one for all: reading into new memory takes longer
        while num_bytes := file.readinto(part):  # type: ignore[attr-defined]
            digest.update(part[:num_bytes])
    if digest.hexdigest() != entry.sha256:
        raise CorruptCheckpointError(f"{path} is damaged: its checksum is not that of what was saved.")


def has_content(path: Path, content: Iterable[bytes | memoryview]) -> bool:
    """Whether a file has this content, byte by byte; no where it cannot be read."""
    try:
        with open_regular(path) as file:
            read = bytearray(2**20)
            for part in content:
                view = memoryview(part).cast("B")
                for start in range(0, len(view), len(read)):
                    wanted = view[start : start + len(read)]
                    found = read if len(wanted) == len(read) else bytearray(len(wanted))
                    if file.readinto(found) < len(wanted) or found != wanted:  # type: ignore[attr-defined]
                        return False
            return not file.read(1)
    except (OSError, CheckpointError):
        return False


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


class FilesTogether:
    """New files of what is in memory, each of which reaches the disk while others are hashed and written.

    ::

        caller     write a │ hash a │ write b │ hash b │ join
        threads             fsync a ░░░░░░░░░  fsync b ░░
    """

    def __init__(self, before: Callable[[str, Path], None]):
        self._before = before
        self._files = ExitStack()
        self._threads: list[threading.Thread] = []
        self._problems: list[OSError] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for thread in self._threads:
            thread.join()
        self._files.close()
        if self._problems and kind is None:
            raise self._problems[0]

    def write(self, path: Path, content: Sequence[bytes | memoryview]) -> FileEntry:
        self._before("create", path)
        file = self._files.enter_context(path.open("xb", buffering=0))
        views = [memoryview(part).cast("B") for part in content]
        for view in views:
            for start in range(0, len(view), _CHUNK):
                self._before("write", path)
                _write_all(file, view[start : start + _CHUNK])
        self._before("fsync", path)
        thread = threading.Thread(target=self._sync, args=(file.fileno(),), name="shardwright-fsync")
        thread.start()
        self._threads.append(thread)
        digest = sha256()
        for view in views:
            digest.update(view)
        return FileEntry(size=sum(map(len, views)), sha256=digest.hexdigest())

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._problems.append(error)


class Disk:
    """Writes files and folders so that they outlive a loss of power."""

    def __init__(self, before: Callable[[str, Path], None] = lambda operation, path: None):
        self._before = before

    def make_draft(self, path: Path) -> None:
        """Makes a new folder, which need not outlive a loss of power until it is renamed."""
        self._before("mkdir", path)
        path.mkdir()

    def make_folder(self, path: Path) -> None:
        """Makes a new folder, and any around it."""
        self._before("mkdir", path)
        missing = [path]
        while not missing[-1].parent.is_dir():
            missing.append(missing[-1].parent)
        path.mkdir(parents=True)
        for made in reversed(missing):
            self.sync_folder(made.parent)

    def together(self) -> FilesTogether:
        """Writes several new files, which have all reached the disk at its end."""
        return FilesTogether(self._before)

    def write(self, path: Path, content: Iterable[bytes | memoryview], *, lasts: bool = True) -> FileEntry:
        """Writes a new file; its content has reached the disk when this returns, where it lasts."""

        def save(file: "NewFile") -> None:
            for part in content:
                file.write(part)

        return self.write_with(path, save, lasts=lasts)

    def write_with(self, path: Path, save: "Callable[[NewFile], object]", *, lasts: bool = True) -> FileEntry:
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
            if lasts:
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
        """Gives a file a second name; see `sync_folder`."""
        self._before("link", path)
        os.link(path, other)

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
