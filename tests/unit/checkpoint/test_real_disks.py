"""Disks that are really full or read-only: what was there stays, and is read; what comes next works."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.checkpoints import save, values
from checkpoint.models import save_model
from mounts import SmallDisk, in_own_mounts
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.hugging_face import ModelTensors, export_files
from shardwright.cli import main

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


def test_commands_say_that_a_disk_is_read_only(
    on_disk: OnDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "run", 1, {"w": torch.ones(4)})
    export_files(ModelTensors(CheckpointFolder(tmp_path / "run").open()), tmp_path / "hf", config={})

    def test(disk: SmallDisk) -> None:
        for step in (1, 2):
            save(disk.path / "checkpoints", step)
        disk.set_read_only(True)
        for words, text in (
            (["gc", disk.path, "--keep", "1"], "cannot be cleared: Read-only file system"),
            (["import", tmp_path / "hf", "--to", disk.path / "new"], "Read-only file system"),
            (["export", tmp_path / "run", "--to", disk.path / "out"], "Read-only file system"),
        ):
            with pytest.raises(SystemExit) as ended:
                main(["ckpt", *map(str, words)])
            assert ended.value.code == 2
            assert text in capsys.readouterr().err
        for words in (["ls"], ["verify"]):
            with pytest.raises(SystemExit) as ended:
                main(["ckpt", *words, str(disk.path)])
            assert not ended.value.code

    on_disk(test, 64 * PAGE)
