"""A folder of checkpoints: lists, begins, commits, finds, verifies and removes them.

It is replaced as a whole and has its own checksum: it is never half written, and no flipped byte hides a
checkpoint unnoticed.

::

    begin      mkdir step-00000120.tmp-1f3a      a crash leaves this: invisible, collected later
    (ranks write their files, each with fsync)
    commit     write manifest.json, fsync
               rename to step-00000120           a crash leaves this: still invisible
               replace COMMITTED                 from here on it is there
    collect    replace COMMITTED without old ones, then remove their folders
"""

import json
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, field_validator

from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    FileEntry,
    Manifest,
    NewerVersionError,
    Record,
    Sha256,
    is_plain_name,
)
from shardwright.checkpoint.safe_files import read_regular, reading
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.errors import CheckpointError, CorruptCheckpointError, UsageError

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


_STEP = re.compile(r"step-\d{8,}(\.\d+)?(\.tmp-[0-9a-f]+)?")


class CheckpointFolder:
    """Checkpoints in a folder. One process at a time writes to it; others may read."""

    def __init__(self, root: Path, *, disk: Disk | None = None):
        self.root = root
        self._disk = disk or Disk()

    # ---- finding ----

    def commits(self) -> tuple[Commit, ...]:
        """The checkpoints, oldest first; none where nothing was ever saved."""
        with reading(self.root):
            if not _is_folder(self.root, or_link=True):
                return ()
            is_listed = (self.root / COMMITTED).exists() or COMMITTED in os.listdir(self.root)
            if not is_listed and not self.step_folders():
                return ()
        return read_commits(self.root)

    def open(self, name: str | None = None, *, verify: bool = True) -> SavedCheckpoint:
        """A checkpoint, to read it."""
        commits = self.commits()
        if not commits:
            raise CheckpointError(f"{self.root} has no checkpoint.")
        chosen = [commit for commit in commits if name in (None, commit.name)]
        if not chosen:
            names = ", ".join(commit.name for commit in commits)
            raise CheckpointError(f"{self.root} has no checkpoint {name}. It has {names}.")
        with reading(self.root / chosen[-1].name):
            return self._open(chosen[-1], verify=verify)

    def _open(self, commit: Commit, *, verify: bool) -> SavedCheckpoint:
        path = self.root / commit.name
        if not _is_folder(path):
            raise CorruptCheckpointError(f"{path} is missing, and {COMMITTED} lists it.")
        content = read_regular(path / MANIFEST)
        if sha256(content).hexdigest() != commit.manifest_sha256:
            raise CorruptCheckpointError(
                f"{path / MANIFEST} is not the one that was committed: its checksum differs."
            )
        manifest = Manifest.from_bytes(content, name=str(path / MANIFEST))
        if verify:
            manifest.check(path)
        return SavedCheckpoint(path, manifest)

    def lists(self, name: str) -> bool:
        """Whether a checkpoint is there still: the run that saves may have removed it, as too old."""
        return name in {commit.name for commit in self.commits()}

    # ---- writing ----

    def begin(self, step: int) -> Path:
        """Makes the folder of a new checkpoint, in which files can be put."""
        if not self.root.is_dir():
            self._disk.make_folder(self.root)
        if not (self.root / COMMITTED).exists() and not self.step_folders():
            write_commits(self.root, (), disk=self._disk)
        draft = self.root / f"{self._new_name(step)}.tmp-{secrets.token_hex(4)}"
        self._disk.make_folder(draft)
        return draft

    def _new_name(self, step: int) -> str:
        """Above all that are listed of the step: a run that resumed from an older one saves steps again.

        A lower number may be free, after `collect`. But `recover` would take what has it for an older save.
        """
        plain = f"step-{step:08}"
        names = [commit.name for commit in self.commits()]
        numbers = [save_number(name) for name in names if name.partition(".")[0] == plain]
        return f"{plain}.{max(numbers) + 1}" if numbers else plain

    def commit(
        self, draft: Path, *, step: int, files: Mapping[str, FileEntry], not_finite: Sequence[str] = ()
    ) -> Commit:
        """Makes a draft a checkpoint."""
        bad = tuple(not_finite) or None
        manifest = Manifest(step=step, files=dict(files), not_finite=bad).to_bytes()
        self._disk.write(draft / MANIFEST, [manifest])
        self._disk.sync_folder(draft)
        name = draft.name.partition(".tmp-")[0]
        commits = self.commits()
        if (self.root / name).exists():  # renamed, and never committed
            self._disk.remove_folder(self.root / name)
        self._disk.rename(draft, self.root / name)
        made = Commit(name=name, step=step, manifest_sha256=sha256(manifest).hexdigest())
        write_commits(self.root, (*commits, made), disk=self._disk)
        return made

    def discard(self, draft: Path) -> None:
        """Removes a draft."""
        if draft.is_dir():
            self._disk.remove_folder(draft)

    def collect(self, *, keep: int | None) -> tuple[str, ...]:
        """Removes old checkpoints, and what crashes have left.

        Old ones go only if the newest is verified, now; and one with finite weights always stays, the newest
        that has them. Nobody else may be saving meanwhile.
        """
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is {keep}, and at least one checkpoint must stay.")
        commits = self.commits()
        staying = commits
        if keep is not None and len(commits) > keep:
            self.open(commits[-1].name).check()
            staying = self._staying(commits, keep)
        if staying != commits:
            write_commits(self.root, staying, disk=self._disk)
        names = {commit.name for commit in staying}
        unlisted = [path for path in self.step_folders() if path.name not in names]
        removed = [path for path in unlisted if not path.is_symlink()]  # no save makes links
        for path in removed:
            self._disk.remove_folder(path)
        for path in self.root.glob(f"{COMMITTED}.tmp-*") if self.root.is_dir() else ():
            path.unlink()
        return tuple(path.name for path in removed)

    def _staying(self, commits: tuple[Commit, ...], keep: int) -> tuple[Commit, ...]:
        """The newest, and the newest whose weights are finite."""
        finite = next((commit for commit in reversed(commits) if self.has_finite_weights(commit)), None)
        newest = commits[-keep:]
        return newest if finite is None or finite in newest else (finite, *newest)

    def has_finite_weights(self, commit: Commit) -> bool:
        """Whether no weight is infinite or NaN, as far as the save has looked; no where it is damaged."""
        try:
            with reading(self.root / commit.name):
                return self._open(commit, verify=False).has_finite_weights
        except CorruptCheckpointError:
            return False

    def step_folders(self) -> list[Path]:
        """Folders with names of checkpoints, listed or not, drafts too."""
        if not self.root.is_dir():
            return []
        return sorted(p for p in self.root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())


def save_number(name: str) -> int:
    """The number of a folder's save, of all saves of its step.

    >>> save_number("step-00000002"), save_number("step-00000002.10")
    (1, 10)
    """
    number = name.partition(".")[2]
    return int(number) if number.isdecimal() else 1


def refuse_one_checkpoint(path: Path) -> None:
    """Refuses a checkpoint where the folder that has it is meant: a lock in it would damage it."""
    if (path / MANIFEST).exists():
        folder = path.absolute().parent
        raise UsageError(f"{path} is one checkpoint. Give the folder that it is in: {folder}.")


def _is_folder(path: Path, *, or_link: bool = False) -> bool:
    """Whether it is one; from Python 3.14 on, `Path.is_dir` also says no where this process may not look."""
    try:
        return stat.S_ISDIR(path.stat(follow_symlinks=or_link).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
