"""Saves that end in the middle leave the old checkpoint or the new one, never a mix."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.checkpoints import save, values
from choices import in_sweep
from dying import die, in_child
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder


class _Counted:
    """Does something before an operation on the disk."""

    def __init__(self, at: int | None, action: Callable[[], None]):
        self.operations: list[str] = []
        self._at = at
        self._action = action

    def __call__(self, operation: str, path: Path) -> None:
        if len(self.operations) == self._at:
            self._action()
        self.operations.append(operation)


def _operations(root: Path, **keep: int) -> list[str]:
    counted = _Counted(None, die)
    save(root, 9, disk=Disk(counted), **keep)
    return counted.operations


@pytest.mark.parametrize("earlier", [in_sweep(()), in_sweep((1,)), (1, 2)], ids=len)
def test_every_operation_of_a_save_is_a_place_todie(earlier: tuple[int, ...], tmp_path: Path) -> None:
    """Killed at each write, fsync, rename and removal, in a first save and in later ones: old or new."""
    cases = 0
    shape = tmp_path / f"shape-{len(earlier)}"
    for step in earlier:
        save(shape, step)
    operations = _operations(shape, keep=2)
    assert {"write", "fsync", "rename", "create", "mkdir"} <= set(operations)
    for at in range(len(operations) + 1):
        root = tmp_path / f"{len(earlier)}-{at}"
        for step in earlier:
            save(root, step)
        disk = Disk(_Counted(at, die))
        ended = in_child(lambda root=root, disk=disk: save(root, 9, keep=2, disk=disk))  # type: ignore[misc]
        assert ended == (signal.SIGKILL if at < len(operations) else 0)
        commits = [commit.step for commit in CheckpointFolder(root).commits()]
        assert commits in ([*earlier], [*earlier, 9], [*earlier, 9][-2:])
        if commits:
            assert values(root) == {float(commits[-1])}
        save(root, 10, keep=2)  # the next run saves, and clears what was left
        assert values(root) == {10.0}
        folders = {path.name for path in root.iterdir()}
        assert folders == {commit.name for commit in CheckpointFolder(root).commits()}
        cases += 1
    assert cases >= 15


def _content(path: Path) -> object:
    return set(os.listdir(path)) if path.is_dir() else path.read_bytes()


def test_nothing_gets_its_name_before_it_has_reached_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power takes what nobody has synced, names in folders too; killing a process takes nothing."""
    root, fsync, on_disk = tmp_path / "new" / "checkpoints", os.fsync, {}

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = _content(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def check(*paths: Path) -> None:
        assert [path for path in paths if on_disk.get(path.stat().st_ino) != _content(path)] == []

    def before(operation: str, path: Path) -> None:
        if operation == "rename":
            check(path, *(path.iterdir() if path.is_dir() else ()))
            listed = on_disk.get(root.stat().st_ino, set())
            assert path.is_dir() or listed >= {each.name for each in root.glob("step-*")}

    monkeypatch.setattr(os, "fsync", noted)
    for step in (1, 2):
        save(root, step, disk=Disk(before))
        check(tmp_path, root.parent, root, root)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_an_error_at_any_operation_keeps_the_old_checkpoint(tmp_path: Path, number: int) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    save(tmp_path / "shape", 1)
    total = len(_operations(tmp_path / "shape"))
    for at in range(total):
        root = tmp_path / str(at)
        save(root, 1)
        with pytest.raises(OSError, match=os.strerror(number)):
            save(root, 9, disk=Disk(_Counted(at, fail)))
        assert len(values(root)) == 1
        assert values(root) <= {1.0, 9.0}
        save(root, 10)
        assert values(root) == {10.0}
