"""Rebuilds a missing or damaged list of checkpoints from the folders that are whole.

::

    read all         one of a version to come, or that this process may not read, or an order that is
                     unclear: nothing is changed
    put aside        rename step-00000003, which is not whole, to damaged-step-00000003, and
                     COMMITTED to damaged-COMMITTED, where it is a folder
                     a crash leaves this: there is still no list, and recovery can be repeated
    replace COMMITTED

The next run removes checkpoints that the list omits, as remains of a crash; so recovery sets them aside
first.
"""

import os
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from shlex import quote

from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import COMMITTED, CheckpointFolder, Commit, save_number, write_commits
from shardwright.checkpoint.manifest import MANIFEST, Manifest, NewerVersionError
from shardwright.checkpoint.safe_files import read_regular, reading
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.errors import CheckpointError, CorruptCheckpointError


class Order(StrEnum):
    """The sort key of checkpoints."""

    STEP = "step"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class FolderFound:
    """The outcome for one folder.

    Attributes:
        name: of it, when it was found.
        problem: why it is not listed; None where it is.
        aside: its new name, which no run touches; None where it kept its own.
    """

    name: str
    problem: str | None = None
    aside: str | None = None


@dataclass(frozen=True, slots=True)
class _Whole:
    """A checkpoint that is whole.

    Attributes:
        commit: its entry for the list.
        number: of the save of this step: 2 for step-00000002.2.
        saved_ns: when its manifest was written.
    """

    commit: Commit
    number: int
    saved_ns: int


def recover(root: Path, *, order: Order | None = None, disk: Disk | None = None) -> tuple[FolderFound, ...]:
    """Rebuilds the list of checkpoints, and sets damaged ones aside. Nobody else may be saving."""
    disk = disk or Disk()
    folder = CheckpointFolder(root, disk=disk)
    _refuse_sound(folder)
    whole: list[_Whole] = []
    problems: dict[Path, str] = {}
    for path in folder.step_folders():
        if ".tmp-" in path.name:
            continue
        try:
            with reading(path):
                whole.append(_whole(path))
        except NewerVersionError:
            raise  # not damaged at all
        except CorruptCheckpointError as error:
            problems[path] = str(error)
    if not whole:
        if not problems:
            raise _nothing_there(folder)
        return tuple(FolderFound(path.name, problem) for path, problem in problems.items())
    commits = _in_order(root, whole, order)
    others = [
        FolderFound(path.name, problem, _put_aside(path, disk=disk))
        for path, problem in {**_in_place_of_list(root), **problems}.items()
    ]
    write_commits(root, commits, disk=disk)
    return (*(FolderFound(commit.name) for commit in commits), *others)


def _refuse_sound(folder: CheckpointFolder) -> None:
    try:
        commits = folder.commits()
    except NewerVersionError:
        raise
    except CorruptCheckpointError:
        return
    raise CheckpointError(
        f"the list of checkpoints in {folder.root} is sound, and has {len(commits)}: there is nothing "
        f"to recover. {_way_on(folder, commits)}"
    )


def _way_on(folder: CheckpointFolder, commits: tuple[Commit, ...]) -> str:
    """The advice where the list is sound: a damaged checkpoint is the likely cause of a recovery."""
    if not commits:
        drafts = _drafts(folder)
        of_drafts = f" {_described(drafts)}; the next save removes them." if drafts else ""
        return f"No save there has ended.{of_drafts}"
    try:
        folder.open().check()
    except CorruptCheckpointError as error:
        newest = f"Its newest checkpoint cannot be used: {error}"
        if len(commits) == 1:
            return f"{newest} There is none before it: give the run another folder, and it begins anew."
        return (
            f"{newest} shardwright run --allow-older, or resume(allow_older=True), goes on from the one "
            f"before it that can; shardwright ckpt verify {folder.root} says which ones can."
        )
    return f"The newest is whole; shardwright ckpt verify {folder.root} reads all of them."


def _drafts(folder: CheckpointFolder) -> list[Path]:
    return [path for path in folder.step_folders() if ".tmp-" in path.name]


def _described(drafts: list[Path]) -> str:
    names = ", ".join(path.name for path in drafts[:3])
    more = f" and {len(drafts) - 3} more" if len(drafts) > 3 else ""
    return f"What is there are drafts of saves that did not end: {names}{more}"


def _nothing_there(folder: CheckpointFolder) -> CorruptCheckpointError:
    """For a list that is lost or damaged where no checkpoint is, whole or not: runs are refused there."""
    root, drafts = folder.root, _drafts(folder)
    of_drafts = f" {_described(drafts)}." if drafts else ""
    in_the_way = [COMMITTED, "step-*.tmp-*"] if drafts else [COMMITTED]
    paths = " ".join(f"{quote(str(root))}/{each}" for each in in_the_way)
    return CorruptCheckpointError(
        f"{root} has no checkpoint, whole or damaged, to make a list of.{of_drafts} Nothing was changed. For "
        f"a run to begin anew there, remove {' and '.join(in_the_way)}: rm -rf {paths}"
    )


def _in_place_of_list(root: Path) -> dict[Path, str]:
    """A folder of the list's name: nothing can be renamed to that. Anything else is replaced."""
    path = root / COMMITTED
    if path.is_symlink() or not path.is_dir():
        return {}
    return {path: f"{path} is a folder, and no list."}


def _whole(path: Path) -> _Whole:
    if path.is_symlink():  # before anything is read through it
        raise CorruptCheckpointError(f"{path} is a link. Checkpoints have none; nothing was read.")
    content = read_regular(path / MANIFEST)
    manifest = Manifest.from_bytes(content, name=str(path / MANIFEST))
    if manifest.step != int(path.name.removeprefix("step-").partition(".")[0]):
        raise CorruptCheckpointError(f"{path / MANIFEST} is of step {manifest.step}.")
    manifest.check(path)
    SavedCheckpoint(path, manifest).check()
    commit = Commit(name=path.name, step=manifest.step, manifest_sha256=sha256(content).hexdigest())
    return _Whole(commit, number=save_number(path.name), saved_ns=(path / MANIFEST).stat().st_mtime_ns)


def _in_order(root: Path, whole: list[_Whole], order: Order | None) -> tuple[Commit, ...]:
    """The list, oldest first.

    Neither order is always right: a run that resumed from an older checkpoint saves lower steps later, and
    folders that were copied have new times.
    """
    by_step = sorted(whole, key=lambda one: (one.commit.step, one.number))
    by_time = sorted(by_step, key=lambda one: one.saved_ns)
    if order is None and by_step != by_time:
        of_step, of_time = by_step[-1].commit.name, by_time[-1].commit.name
        older = ", and older ones are in another order" if of_step == of_time else ""
        raise CheckpointError(
            f"which checkpoint in {root} is the newest is unclear: by their steps {of_step}, by the times of "
            f"their manifests {of_time}{older}. A run that resumed from an older one saves lower steps "
            "later: then the times are right. Folders that were copied may have new times: then the steps "
            f"are. Nothing was changed; say which: shardwright ckpt recover {root} --order step, or "
            "--order time."
        )
    return tuple(one.commit for one in (by_time if order is Order.TIME else by_step))


def _put_aside(path: Path, *, disk: Disk) -> str:
    """Renames a folder so that neither a save nor `collect` takes it for what a crash has left."""
    aside, number = path.with_name(f"damaged-{path.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"damaged-{number}-{path.name}")
    disk.rename(path, aside)
    return aside.name
