"""A folder of checkpoints: lists, begins, commits, finds, verifies and removes them.

::

    begin      mkdir step-00000120.tmp-1f3a      a crash leaves this: invisible, collected later
    (ranks write their files, each with fsync)
    commit     write manifest.json and the other texts, fsync
               rename to step-00000120           from here on it is there
    collect    rename old ones to step-00000100.tmp-2e4b, then remove them

A run that goes back to an older checkpoint saves lower steps later. Its turn, the number behind the step,
says so: step-00000110.2 is newer than step-00000120.
"""

import json
import os
import re
import secrets
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from shardwright.checkpoint.disk import MANIFEST, Disk, FileEntry, Manifest
from shardwright.checkpoint.safe_files import read_regular, reading
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.errors import CheckpointError, CorruptCheckpointError, UsageError

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_DRAFT = re.compile(_NAME.pattern + r"\.tmp-[0-9a-f]+")


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """A checkpoint that is complete, by its name; a newer one is greater.

    >>> [Commit(turn, step).name for turn, step in [(1, 120), (2, 110)]]
    ['step-00000120', 'step-00000110.2']
    """

    turn: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08}" + (f".{self.turn}" if self.turn > 1 else "")


class CheckpointFolder:
    """Checkpoints in a folder. One process at a time writes to it; others may read."""

    def __init__(self, root: Path, *, disk: Disk | None = None):
        self.root = root
        self._disk = disk or Disk()

    # ---- finding ----

    def commits(self) -> tuple[Commit, ...]:
        """The checkpoints, oldest first; none where nothing was ever saved."""
        with reading(self.root):
            if not _is_folder(self.root):
                return ()
            found = [(name, _NAME.fullmatch(name)) for name in _folders_in(self.root)]
        commits = [(name, Commit(int(it[2] or 1), int(it[1]))) for name, it in found if it is not None]
        return tuple(sorted(commit for name, commit in commits if commit.name == name))

    def open(self, name: str | None = None, *, verify: bool = True) -> SavedCheckpoint:
        commits = self.commits()
        if not commits:
            raise CheckpointError(f"{self.root} has no checkpoint.")
        if name is None:
            self._refuse_other_order(commits)
        chosen = [commit for commit in commits if name in (None, commit.name)]
        if not chosen:
            names = ", ".join(commit.name for commit in commits)
            raise CheckpointError(f"{self.root} has no checkpoint {name}. It has {names}.")
        with reading(self.root / chosen[-1].name):
            return self._open(chosen[-1], verify=verify)

    def _open(self, commit: Commit, *, verify: bool) -> SavedCheckpoint:
        path = self.root / commit.name
        if path.is_symlink():  # before anything is read through it
            raise CorruptCheckpointError(f"{path} is a link. Checkpoints have none; nothing was read.")
        manifest = Manifest.from_bytes(read_regular(path / MANIFEST), name=str(path / MANIFEST))
        if manifest.step != commit.step:
            raise CorruptCheckpointError(f"{path / MANIFEST} is of step {manifest.step}.")
        if verify:
            manifest.check(path)
        return SavedCheckpoint(path, manifest)

    def newest(self) -> SavedCheckpoint | None:
        """The newest checkpoint, unverified; None where there is none that can be opened."""
        try:
            commits = self.commits()
            return self.open(commits[-1].name, verify=False) if commits else None
        except CheckpointError:
            return None

    def lists(self, name: str) -> bool:
        """Whether a checkpoint is there still: the run that saves may have removed it, as too old."""
        return name in {commit.name for commit in self.commits()}

    # ---- writing ----

    def begin(self, step: int) -> Path:
        if not self.root.is_dir():
            self._disk.make_folder(self.root)
        commits = self.commits()
        turn = 1 if not commits else commits[-1].turn + (step <= commits[-1].step)
        draft = self._draft_of(Commit(turn, step))
        self._disk.make_draft(draft)
        return draft

    def _draft_of(self, commit: Commit) -> Path:
        return self.root / f"{commit.name}.tmp-{secrets.token_hex(4)}"

    def commit(
        self,
        draft: Path,
        *,
        step: int,
        files: Mapping[str, FileEntry],
        texts: Mapping[str, bytes] = MappingProxyType({}),
        not_finite: Sequence[str] = (),
    ) -> Commit:
        """Makes a draft the newest checkpoint, with the files that are there and those of these texts."""
        with self._disk.together() as made:
            written = {name: made.write(draft / name, [text]) for name, text in texts.items()}
            manifest = Manifest(step=step, files={**files, **written}, not_finite=tuple(not_finite) or None)
            made.write(draft / MANIFEST, [manifest.sealed().to_bytes()])
        self._disk.sync_folder(draft)
        name = draft.name.partition(".tmp-")[0]
        self._disk.rename(draft, self.root / name)
        return next(commit for commit in self.commits() if commit.name == name)

    def discard(self, draft: Path) -> None:
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
            self._refuse_other_order(commits)
            self.open(commits[-1].name).check()
            staying = self._staying(commits, keep)
        for path in (drafts := self.drafts()):
            self._disk.remove_folder(path)
        old = [commit for commit in commits if commit not in staying]
        for commit in old:  # a crash in between leaves no damaged checkpoint
            draft = self._draft_of(commit)
            self._disk.rename(self.root / commit.name, draft)
            self._disk.remove_folder(draft)
        return tuple(sorted([*(path.name for path in drafts), *(commit.name for commit in old)]))

    def _staying(self, commits: tuple[Commit, ...], keep: int) -> tuple[Commit, ...]:
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

    def drafts(self) -> list[Path]:
        """Folders of saves that did not end, or of checkpoints that are being removed."""
        if not self.root.is_dir():
            return []
        return sorted(
            path
            for path in map(self.root.joinpath, _folders_in(self.root))
            if _DRAFT.fullmatch(path.name) and not path.is_symlink()
        )

    def _refuse_other_order(self, commits: Sequence[Commit]) -> None:
        """Refuses to guess which one is the newest, where a run of format 1 had gone back to an older one."""
        there = {commit.name for commit in commits}
        listed = [name for name in _listed_by_format_1(self.root) if name in there]
        newest = commits[-1].name
        if newest in listed and listed[-1] != newest:
            raise CheckpointError(
                f"{self.root} has {newest}, and the list beside it, of an earlier version, says that "
                f"{listed[-1]} was saved later: a run had gone back to an older checkpoint. Say from which "
                f'one to go on, once: checkpoints.resume("{listed[-1]}"); or remove the other one.'
            )


def refuse_one_checkpoint(path: Path) -> None:
    """Refuses a checkpoint where the folder that has it is meant: a lock in it would damage it."""
    if (path / MANIFEST).exists():
        refuse_other_name(path)
        folder = path.absolute().parent
        raise UsageError(f"{path} is one checkpoint. Give the folder that it is in: {folder}.")


def refuse_other_name(path: Path) -> None:
    """Refuses a checkpoint that was copied or renamed so that no listing of its folder has it."""
    folder = path.absolute()
    if _NAME.fullmatch(folder.name) is None:
        step = Manifest.from_bytes(read_regular(path / MANIFEST), name=str(path / MANIFEST)).step
        name = Commit(1, step).name
        raise UsageError(
            f"{path} is a checkpoint of step {step}, and checkpoints are found by their names. Rename it: "
            f"{shlex.join(['mv', str(path), str(folder.parent / name)])}"
        )


def _folders_in(root: Path) -> list[str]:
    """Names of folders, and of links, which are refused when they are read."""
    with os.scandir(root) as entries:
        return [entry.name for entry in entries if entry.is_symlink() or entry.is_dir()]


def _listed_by_format_1(root: Path) -> list[str]:
    """The checkpoints in the order in which they were saved; none without a list."""
    path = root / "COMMITTED"
    if not path.is_file():
        return []
    try:
        return [str(commit["name"]) for commit in json.loads(read_regular(path))["checkpoints"]]
    except (ValueError, KeyError, TypeError, CorruptCheckpointError):
        return []  # damaged: the names are all there is


def _is_folder(path: Path) -> bool:
    """Whether it is one; from Python 3.14 on, `Path.is_dir` also says no where this process may not look."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
