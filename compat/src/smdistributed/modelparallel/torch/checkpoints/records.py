"""What stands beside the files of a checkpoint: their sizes and checksums, and who has saved them."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from shardwright.checkpoint.disk import FileEntry, Record, is_plain_name
from shardwright.comm.codec import declare
from shardwright.errors import CorruptCheckpointError

_CHUNK = 4 * 2**20


declare(FileEntry)


class _Files(Record):
    version: Literal[1] = 1
    tag: str
    files: dict[str, FileEntry]

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: Mapping[str, Any]) -> Any:
        for name in files:
            if "/" in name or "\0" in name or name.startswith("."):
                raise ValueError(f"{name!r} is no name of a file of a checkpoint")
        return files


class PartialRecord(_Files):
    """Describes a folder with the parts that ranks have saved.

    Attributes:
        files: by name, every file but this record.
        number: how many partial checkpoints were saved before into the same folder.
        tensor: ranks that shared every layer of a partition.
        added: what was added to the user's content, by name, for scripts that merge shards.
        has_user_content: there is something beside what was added.
    """

    format: Literal["smp partial checkpoint"] = "smp partial checkpoint"
    number: NonNegativeInt
    world_size: PositiveInt
    pipeline: PositiveInt
    tensor: PositiveInt = 1
    data: PositiveInt
    shard: PositiveInt
    added: tuple[str, ...] = ()
    has_user_content: bool = True

    @field_validator("files")
    @classmethod
    def _in_the_folder(cls, files: Mapping[str, Any]) -> Any:
        for name in files:
            if not is_plain_name(name):
                raise ValueError(f"{name!r} is no name of a file in the folder")
        return files


class FullRecord(_Files):
    """Describes the files of a full checkpoint."""

    format: Literal["smp full checkpoint"] = "smp full checkpoint"


def verify(path: Path, entry: FileEntry) -> None:
    """Compares a file with what was saved."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise CorruptCheckpointError(f"{path} is no regular file. Nothing was loaded.")
    if not path.exists():
        raise CorruptCheckpointError(f"{path} is missing, and belongs to the checkpoint. Nothing was loaded.")
    size = path.stat().st_size
    if size != entry.size:
        raise CorruptCheckpointError(
            f"{path} has {size} bytes, and was saved with {entry.size}. Nothing was loaded."
        )
    digest = sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
    if digest.hexdigest() != entry.sha256:
        raise CorruptCheckpointError(
            f"{path} is damaged: its checksum is not that of what was saved. Nothing was loaded."
        )


def fits(path: Path, entry: FileEntry) -> bool:
    """Whether a file is what was saved."""
    try:
        verify(path, entry)
    except CorruptCheckpointError:
        return False
    return True
