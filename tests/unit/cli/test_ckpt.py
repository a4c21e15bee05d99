"""``shardwright ckpt``."""

import errno
import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from checkpoint.checkpoints import save, save_bad

from cli.calling import call
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.tensor_file import file_content
from shardwright.errors import CheckpointError, CorruptCheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints, and what a crash has left of a third."""
    for step in (10, 20):
        save(tmp_path / "run" / "checkpoints", step)
    (tmp_path / "run" / "checkpoints" / "step-00000030.tmp-00ff").mkdir()
    return tmp_path / "run"


def test_lists(run, capsys):
    code, out, _ = call(capsys, "ckpt", "ls", run)
    assert code == 0
    header, first, second = out.splitlines()
    assert header.split()[:2] == ["checkpoint", "step"]
    assert first.split()[:2] == ["step-00000010", "10"]
    assert second.split()[:2] == ["step-00000020", "20"]
    code, out, _ = call(capsys, "ckpt", "ls", run / "checkpoints", "--json")
    assert [each["step"] for each in json.loads(out)] == [10, 20]


def test_the_list_for_programs_has_numbers_and_times(run, capsys):
    """Bug: it had texts such as "size": "9.9 MiB"."""
    folder = run / "checkpoints" / "step-00000010"
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    (run / "checkpoints" / "step-00000020" / "manifest.json").unlink()
    first, second = json.loads(call(capsys, "ckpt", "ls", run, "--json")[1])
    assert first == {
        "name": "step-00000010",
        "step": 10,
        "saved_at": f"{datetime.fromtimestamp(folder.stat().st_mtime, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "num_bytes": sum(path.stat().st_size for path in files),
        "num_files": len(files),
        "not_finite": [],
        "problem": None,
    }
    assert (second["step"], second["num_bytes"], second["saved_at"]) == (20, None, None)
    assert "manifest.json" in second["problem"]


def test_verifies(run, capsys):
    assert call(capsys, "ckpt", "verify", run)[:2] == (0, "step-00000010  ok\nstep-00000020  ok\n")
    path = run / "checkpoints" / "step-00000010" / "state.json"
    path.write_bytes(path.read_bytes()[:-1])
    code, out, err = call(capsys, "ckpt", "verify", run)
    assert code == 8
    assert "state.json has 11 bytes, and was saved with 12" in out
    assert "1 of 2 checkpoints" in err
    assert "step-00000010" in err
    assert call(capsys, "ckpt", "verify", run, "step-00000020")[0] == 0
    code, _, err = call(capsys, "ckpt", "verify", run, "step-7")
    assert code == 2
    assert "It has step-00000010, step-00000020" in err


def test_weights_that_are_not_finite(run, capsys):
    """Bug: NaN was called ok."""
    save_bad(run / "checkpoints", 30)
    code, out, err = call(capsys, "ckpt", "verify", run)
    assert code == 7
    assert out.splitlines()[1:] == [
        "step-00000020  ok",
        "step-00000030  whole, but its weights are not finite: w",
    ]
    assert "1 of 3 checkpoints" in err
    found = json.loads(call(capsys, "ckpt", "verify", run, "step-00000030", "--json")[1])
    assert found == [{"name": "step-00000030", "problem": None, "not_finite": ["w"]}]
    rows = json.loads(call(capsys, "ckpt", "ls", run, "--json")[1])
    assert [row["not_finite"] for row in rows] == [[], [], ["w"]]


def test_what_this_process_cannot_read_is_not_called_damaged(run, capsys, unreadable):
    """Bug: `verify` and `ls` ended with a traceback."""
    unreadable("step-00000020/manifest.json", errno.EMFILE)
    code, out, err = call(capsys, "ckpt", "verify", run)
    assert code == 2
    assert "step-00000010  ok\n" in out
    assert "manifest.json could not be read: Too many open files." in out
    assert "1 of 2 checkpoints" in err
    assert "could not be read, and may be whole: step-00000020." in err
    code, out, _ = call(capsys, "ckpt", "ls", run)
    assert (code, "which may be whole. Raise the limit (ulimit -n)" in out) == (0, True)
    code, _, err = call(capsys, "ckpt", "gc", run, "--keep", "1")
    assert (code, "Too many open files" in err) == (2, True)
    assert (run / "checkpoints" / "step-00000010").is_dir()


def test_what_the_disk_does_not_give_back_is_damaged(run, capsys, unreadable):
    """Bug: `verify` ended with a traceback."""
    unreadable("step-00000020/rank-00000.safetensors", errno.EIO)
    code, out, _ = call(capsys, "ckpt", "verify", run)
    assert code == 8
    assert "rank-00000.safetensors cannot be read: Input/output error." in out
    unreadable("step-00000020/manifest.json", errno.EACCES)
    code, out, _ = call(capsys, "ckpt", "verify", run)
    assert (code, "manifest.json could not be read: Permission denied." in out) == (2, True)


@pytest.mark.parametrize("refused", ["checkpoints", "step-00000020"])
def test_what_this_process_may_not_see_is_not_called_missing(run, monkeypatch, refused):
    """A run would begin anew, or from an older checkpoint, where it may not look into the folder."""
    plain = Path.stat

    def look(path, **options):
        if refused in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return plain(path, **options)

    def is_there(path):  # as Python has it from 3.14 on
        try:
            return bool(path.stat())
        except OSError:
            return False

    monkeypatch.setattr(Path, "stat", look)
    for name in ("is_dir", "exists"):
        monkeypatch.setattr(Path, name, is_there)
    with pytest.raises(CheckpointError, match="could not be read: Permission denied") as raised:
        CheckpointFolder(run / "checkpoints").open()
    assert not isinstance(raised.value, CorruptCheckpointError)


def test_clears(run, capsys):
    code, out, _ = call(capsys, "ckpt", "gc", run, "--keep", "1")
    assert code == 0
    assert out.splitlines() == [
        "removed step-00000010",
        "removed step-00000030.tmp-00ff",
        "1 checkpoint left",
    ]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [".lock", "step-00000020"]


def test_says_what_is_not_there(tmp_path, capsys):
    code, _, err = call(capsys, "ckpt", "ls", tmp_path / "nothing")
    assert code == 2
    assert "there is no folder" in err
    assert call(capsys, "ckpt", "ls", tmp_path)[:2] == (0, f"no checkpoints in {tmp_path}\n")
    code, _, err = call(capsys, "ckpt", "verify", tmp_path)
    assert (code, "has no checkpoint" in err) == (2, True)
    code, _, err = call(capsys, "ckpt", "gc", "--keep", "1", tmp_path)
    assert (code, "has no checkpoint, and nothing that a save has left" in err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_few_at_least_stay(run, capsys):
    code, _, err = call(capsys, "ckpt", "gc", run, "--keep", "0")
    assert (code, "at least one" in err) == (2, True)


def test_nothing_is_removed_behind_a_damaged_one_and_it_says_so(run, capsys):
    (run / "checkpoints" / "step-00000020" / "state.json").unlink()
    code, _, err = call(capsys, "ckpt", "gc", run, "--keep", "1")
    assert (code, "state.json is missing. Nothing was removed" in err) == (8, True)
    assert (run / "checkpoints" / "step-00000010").is_dir()


def test_what_the_run_removes_meanwhile_is_not_called_damaged(run, capsys, monkeypatch, tmp_path):
    """Bug: `verify` ended with 8 where a run that goes on had removed its oldest checkpoint by then."""
    root = run / "checkpoints"

    def removed_then_checked(manifest, folder):
        if folder.name == "step-00000010" and folder.is_dir():
            CheckpointFolder(root).collect(keep=1)
        check(manifest, folder)

    check = Manifest.check
    monkeypatch.setattr(Manifest, "check", removed_then_checked)
    code, out, err = call(capsys, "ckpt", "verify", run)
    assert (code, out) == (0, "step-00000020  ok\n")
    assert "step-00000010 was removed meanwhile" in err
    shutil.rmtree(root)
    save(root, 10)
    save(root, 20)
    code, _, err = call(capsys, "ckpt", "export", run, "--name", "step-00000010", "--to", tmp_path / "out")
    assert (code, "was removed while it was read" in err) == (2, True)


def test_one_checkpoint_is_not_taken_for_a_folder_of_them(run, capsys, tmp_path, monkeypatch):
    """`gc` said that 0 checkpoints stay, and left a lock in it, for which it was refused from then on."""
    chosen = run / "checkpoints" / "step-00000010"
    (tmp_path / "model.safetensors").write_bytes(b"".join(file_content({})))
    for words in (
        ["gc", chosen, "--keep", "1"],
        ["ls", chosen],
        ["import", tmp_path / "model.safetensors", "--to", chosen],
    ):
        code, _, err = call(capsys, "ckpt", *words)
        assert (code, f"Give the folder that it is in: {chosen.parent}" in err) == (2, True)
    assert call(capsys, "ckpt", "verify", chosen)[:2] == (0, "step-00000010  ok\n")
    monkeypatch.chdir(chosen)
    assert call(capsys, "ckpt", "verify", ".")[:2] == (0, "step-00000010  ok\n")
    code, _, err = call(capsys, "ckpt", "verify", chosen, "step-00000020")
    assert (code, "is a checkpoint, and step-00000020 is another one" in err) == (2, True)
