"""The file that lists the committed checkpoints. A checkpoint that it does not name is invisible.

It is replaced as a whole and has its own checksum: it is never half written, and no flipped byte hides a
checkpoint unnoticed.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, field_validator

from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.manifest import FORMAT_VERSION, NewerVersionError, Record, Sha256, is_plain_name
from shardwright.checkpoint.reading import reading
from shardwright.checkpoint.regular_file import read_regular
from shardwright.errors import CorruptCheckpointError

__all__ = ["COMMITTED", "Commit", "read_commits", "write_commits"]

COMMITTED = "COMMITTED"


class Commit(Record):
    """A checkpoint that is complete.

    Attributes:
        step: how many steps were done.
    """

    name: str
    step: NonNegativeInt
    manifest_sha256: Sha256

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not is_plain_name(name) or ".tmp-" in name:
            raise ValueError("it must be the name of a folder of a checkpoint")
        return name


class _Commits(Record):
    version: Literal[1] = FORMAT_VERSION
    checkpoints: tuple[Commit, ...]
    sha256: Sha256


def read_commits(root: Path) -> tuple[Commit, ...]:
    """The committed checkpoints of a folder, oldest first."""
    path = root / COMMITTED
    try:
        with reading(path):
            content = read_regular(path)
        found = _Commits.from_bytes(content, name=str(path))
        if found != _of(found.checkpoints) or content != found.to_bytes():
            raise CorruptCheckpointError(f"{path} is damaged: its checksum does not fit what it says.")
    except NewerVersionError:
        raise
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error} It lists the checkpoints; shardwright ckpt recover {root} makes it anew from those "
            "that are whole."
        ) from error
    return found.checkpoints


def write_commits(root: Path, commits: tuple[Commit, ...], *, disk: Disk) -> None:
    """Says which checkpoints there are from now on."""
    disk.replace(root / COMMITTED, _of(commits).to_bytes())


def _of(commits: tuple[Commit, ...]) -> _Commits:
    text = json.dumps([commit.model_dump() for commit in commits], sort_keys=True)
    return _Commits(checkpoints=commits, sha256=sha256(text.encode()).hexdigest())
