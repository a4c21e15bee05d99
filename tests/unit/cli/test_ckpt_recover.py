"""``shardwright ckpt recover``: the list of checkpoints is lost, and they are not."""

import re
import shutil

import pytest
from checkpoint.checkpoints import save

from cli.calling import call
from shardwright.checkpoint.commits import read_commits
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.errors import CorruptCheckpointError


@pytest.fixture
def root(tmp_path):
    for step in (1, 2, 3, 2):  # at last as a run does that has resumed from step 1
        save(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("lost", [True, False])
def test_the_list_is_made_anew_of_checkpoints_that_are_whole(root, lost, capsys):
    (root / "step-00000004.tmp-12ab").mkdir()
    whole = tuple(commit for commit in read_commits(root) if commit.step != 3)
    broken = root / "step-00000003" / "state.json"
    broken.write_bytes(broken.read_bytes() + b" ")
    listed = root / "COMMITTED"
    if lost:
        listed.unlink()
    else:
        listed.write_bytes(listed.read_bytes()[:-3])
    with pytest.raises(CorruptCheckpointError, match=f"shardwright ckpt recover {root} makes it anew"):
        CheckpointFolder(root).open()
    code, out, _ = call(capsys, "ckpt", "recover", root)
    assert code == 0
    assert "step-00000002.2  recovered" in out
    assert re.search(r"step-00000003  .*state\.json", out)
    assert ".tmp" not in out
    assert read_commits(root) == whole
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert code != 0
    assert "is sound, and has 3: there is nothing to recover" in err


def test_a_folder_under_another_name_is_not_listed(root, capsys):
    (root / "COMMITTED").unlink()
    shutil.move(root / "step-00000003", root / "step-00000009")
    _, out, _ = call(capsys, "ckpt", "recover", root)
    assert re.search(r"step-00000009  .*is of step 3", out)
    assert {commit.step for commit in read_commits(root)} == {1, 2}


def test_nothing_is_listed_where_nothing_is_whole(root, capsys):
    for path in root.glob("step-*/manifest.json"):
        path.unlink()
    (root / "COMMITTED").unlink()
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert code == 8
    assert "has no checkpoint that is whole" in err
    assert not (root / "COMMITTED").exists()


def test_a_list_of_a_version_to_come_is_left_alone(root, capsys):
    listed = root / "COMMITTED"
    listed.write_text(listed.read_text().replace('"version": 1', '"version": 2'))
    for words in (["ls"], ["recover"]):
        code, _, err = call(capsys, "ckpt", *words, root)
        assert code == 8
        assert "is of version 2 of the format" in err
        assert "recover" not in err
