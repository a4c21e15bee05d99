"""``shardwright ckpt``."""

import errno
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from checkpoint.checkpoints import save, save_bad

from cli.calling import call


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


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["gc", "--keep", "1"], ["export", "-o", "out"]])
def test_a_checkpoint_that_was_copied_under_another_name_says_which_it_needs(run, capsys, words):
    """It was said that the folder around it has no checkpoint, or to give that folder."""
    path = (run / "checkpoints" / "step-00000020").rename(run / "the best")
    code, _, err = call(capsys, "ckpt", words[0], path, *words[1:])
    assert code == 2
    assert "is a checkpoint of step 20, and checkpoints are found by their names" in err
    assert f"mv '{path}' {run / 'step-00000020'}" in err


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
