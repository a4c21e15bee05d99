"""Saves that end in the middle leave the old checkpoint or the new one, never a mix.

Disks that are really full or read-only: what was there stays, and is read; what comes next works.
"""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.checkpoints import save, values
from dying import Counted, die, in_child
from mounts import SmallDisk, in_own_mounts
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder


def _operations(root: Path, **keep: int) -> list[str]:
    counted = Counted(None, die)
    save(root, 9, disk=Disk(counted), **keep)
    return [operation for operation, _ in counted.operations]


def test_every_operation_of_a_save_is_a_place_to_die(tmp_path: Path) -> None:
    """Killed at each write, fsync, rename and removal: old or new."""
    earlier = (1, 2)
    shape = tmp_path / "shape"
    for step in earlier:
        save(shape, step)
    operations = _operations(shape, keep=2)
    assert {"write", "fsync", "rename", "create", "mkdir"} <= set(operations)
    for at in range(len(operations) + 1):
        root = tmp_path / str(at)
        for step in earlier:
            save(root, step)
        disk = Disk(Counted(at, die))
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
    assert len(operations) >= 14


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
            save(root, 9, disk=Disk(Counted(at, fail)))
        assert len(values(root)) == 1
        assert values(root) <= {1.0, 9.0}
        save(root, 10)
        assert values(root) == {10.0}


PAGE = 4096

OnDisk = Callable[[Callable[[SmallDisk], None], int], None]


@pytest.fixture
def on_disk(tmp_path: Path, capabilities: dict[str, bool]) -> OnDisk:
    """Runs a function with a disk of some bytes."""
    if not capabilities["mounts"]:
        pytest.skip("this process cannot mount file systems")
    place = tmp_path / "disk"
    place.mkdir()

    def run(test: Callable[[SmallDisk], None], num_bytes: int) -> None:
        in_own_mounts(lambda: test(SmallDisk(place, num_bytes)))

    return run


def _error_of(attempt: Callable[[], None]) -> int | None:
    """The number of the error of the system; None where there is none."""
    try:
        attempt()
    except OSError as error:
        return error.errno
    return None


def test_a_disk_that_is_full_at_any_page_keeps_what_it_has(on_disk: OnDisk) -> None:
    def test(disk: SmallDisk) -> None:
        failed = saved = 0
        for pages in range(14):
            root = disk.path / str(pages)
            save(root, 1)
            filler = disk.fill(leaving=pages * PAGE)
            number = _error_of(lambda root=root: save(root, 2))  # type: ignore[misc]
            assert number in (None, errno.ENOSPC)
            failed, saved = failed + (number is not None), saved + (number is None)
            assert values(root) in ({1.0}, {2.0})
            assert (values(root) == {2.0}) == (CheckpointFolder(root).commits()[-1].step == 2)
            filler.unlink()
            save(root, 3, keep=1)
            assert values(root) == {3.0}
            Disk().remove_folder(root)
        assert failed >= 4
        assert saved >= 2

    on_disk(test, 64 * PAGE)


def test_a_read_only_disk_is_read(on_disk: OnDisk) -> None:
    def test(disk: SmallDisk) -> None:
        root = disk.path / "checkpoints"
        for step in (1, 2):
            save(root, step)
        disk.set_read_only(True)
        for attempt in (
            lambda: save(root, 3),
            lambda: CheckpointFolder(root).collect(keep=1),
            lambda: CheckpointFolder(disk.path / "new").begin(1),
        ):
            with pytest.raises(OSError, match="Read-only file system"):
                attempt()
            assert values(root) == {2.0}
            assert len(CheckpointFolder(root).commits()) == 2
        disk.set_read_only(False)
        save(root, 3, keep=1)
        assert values(root) == {3.0}

    on_disk(test, 64 * PAGE)


def test_a_disk_that_becomes_read_only_in_a_save_keeps_what_it_has(on_disk: OnDisk) -> None:
    def test(disk: SmallDisk) -> None:
        operations: list[str] = []
        save(disk.path / "shape", 1)
        save(disk.path / "shape", 2, disk=Disk(lambda operation, _: operations.append(operation)))
        tried = set()
        for at in range(len(operations)):
            root = disk.path / str(at)
            save(root, 1)
            done: list[str] = []

            def stop(operation: str, _: Path, at: int = at, done: list[str] = done) -> None:
                if len(done) == at:
                    disk.set_read_only(True)
                done.append(operation)

            number = _error_of(lambda root=root, stop=stop: save(root, 9, disk=Disk(stop)))  # type: ignore[misc]
            # The system lets no disk become read-only while a file on it is being written. When the new list
            # is in its place, only an fsync is left, which goes well.
            assert number in (errno.EROFS, errno.EBUSY, None)
            if number == errno.EROFS:
                tried.add(operations[at])
            assert values(root) == ({9.0} if number is None else {1.0})
            disk.set_read_only(False)
            save(root, 10)
            assert values(root) == {10.0}
            Disk().remove_folder(root)
        assert tried >= {"mkdir", "create", "rename"}

    on_disk(test, 256 * PAGE)
