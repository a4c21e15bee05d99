"""The manifest of a checkpoint: size and checksum of every file."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator

from shardwright import __version__
from shardwright.checkpoint.safe_files import open_regular, parse, size_of
from shardwright.errors import CorruptCheckpointError
from shardwright.problems import describe, join

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
    """A file."""

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
        while part := file.read(4 * 2**20):
            digest.update(part)
    if digest.hexdigest() != entry.sha256:
        raise CorruptCheckpointError(f"{path} is damaged: its checksum is not that of what was saved.")
