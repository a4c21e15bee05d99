"""``shardwright ckpt recover``: the list of checkpoints is lost, and they are not."""

import errno
import json
import os
import re
import shutil
import subprocess

import pytest
from checkpoint.checkpoints import save

from cli.calling import call
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import COMMITTED, CheckpointFolder, read_commits, write_commits
from shardwright.checkpoint.recovery import Order, recover
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
    assert "the newest is step-00000002.2" in out
    assert re.search(r"step-00000003  .*state\.json.* It is now damaged-step-00000003\.", out)
    assert ".tmp" not in out
    assert read_commits(root) == whole
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert code != 0
    assert "is sound, and has 3: there is nothing to recover" in err


def test_where_the_list_is_sound_it_says_how_to_go_on(root, capsys):
    """Bug: it called everything sound, and whoever came here because the newest is damaged knew no more."""
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert (code, "The newest is whole; shardwright ckpt verify" in err) == (2, True)
    (root / "step-00000002.2" / "state.json").write_bytes(b"{}")
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert code == 2
    assert re.search(r"cannot be used: .*step-00000002\.2/state\.json has 2 bytes", err)
    assert "shardwright run --allow-older, or resume(allow_older=True), goes on from the one before" in err
    write_commits(root, read_commits(root)[-1:], disk=Disk())
    _, _, err = call(capsys, "ckpt", "recover", root)
    assert "There is none before it: give the run another folder" in err
    assert "allow-older" not in err


def test_a_folder_under_another_name_is_not_listed(root, capsys):
    (root / "COMMITTED").unlink()
    shutil.move(root / "step-00000003", root / "step-00000009")
    _, out, _ = call(capsys, "ckpt", "recover", root)
    assert re.search(r"step-00000009  .*is of step 3", out)
    assert {commit.step for commit in read_commits(root)} == {1, 2}


def test_what_is_damaged_is_put_aside_where_no_run_removes_it(root, capsys):
    """Bug: the next run took it for what a crash had left, with all its files that could be rescued."""
    for aside in ("damaged-step-00000003", "damaged-2-step-00000003"):
        (root / "COMMITTED").unlink()
        (root / "step-00000003" / "state.json").unlink()
        code, out, _ = call(capsys, "ckpt", "recover", root, "--json")
        assert code == 0
        names = {each["name"]: each["aside"] for each in json.loads(out)}
        assert names.pop("step-00000003") == aside
        assert names == {"step-00000001": None, "step-00000002": None, "step-00000002.2": None}
        save(root, 3)  # which removes what crashes have left
        assert (root / aside / "rank-00000.safetensors").exists()


def test_a_crash_before_the_list_is_written_loses_nothing(root):
    def crash(operation, path):
        if path.name.startswith("COMMITTED"):
            raise KeyboardInterrupt

    (root / "COMMITTED").unlink()
    (root / "step-00000003" / "state.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        recover(root, disk=Disk(crash))
    with pytest.raises(CorruptCheckpointError, match="shardwright ckpt recover"):
        CheckpointFolder(root).collect(keep=None)
    assert [each.name for each in recover(root)] == ["step-00000001", "step-00000002", "step-00000002.2"]
    assert (root / "damaged-step-00000003").exists()


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_folder_in_the_place_of_the_list_is_put_aside(root, capsys, is_empty):
    """Bug: it was found when the list was written, after damaged checkpoints were renamed."""
    (root / COMMITTED).unlink()
    (root / COMMITTED).mkdir()
    if not is_empty:
        (root / COMMITTED / "notes.txt").write_text("moved here by mistake")
    (root / "step-00000003" / "state.json").unlink()
    code, out, _ = call(capsys, "ckpt", "recover", root)
    assert code == 0
    assert re.search(r"COMMITTED  .*is a folder, and no list\. It is now damaged-COMMITTED\.", out)
    assert out.endswith("the newest is step-00000002.2\n")
    assert len(read_commits(root)) == 3
    assert len(list((root / "damaged-COMMITTED").iterdir())) == (0 if is_empty else 1)


@pytest.mark.parametrize("to", ["step-00000003", "nowhere"])
def test_a_link_in_the_place_of_the_list_is_replaced(root, capsys, to):
    (root / COMMITTED).unlink()
    (root / COMMITTED).symlink_to(to)
    assert call(capsys, "ckpt", "recover", root, "--order", "time")[0] == 0
    assert len(read_commits(root)) == 4


def test_the_order_is_asked_for_where_steps_and_times_disagree(root, capsys):
    """Bug: the newest was that of the youngest file, also where copies were made in another order."""
    (root / "COMMITTED").unlink()
    (root / "step-00000001" / "state.json").unlink()
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert code == 2
    assert "by their steps step-00000003, by the times of their manifests step-00000002.2." in err
    assert f"shardwright ckpt recover {root} --order step, or --order time" in err
    assert not (root / "COMMITTED").exists()
    assert (root / "step-00000001").exists()
    for order, names in (
        (Order.STEP, ["step-00000002", "step-00000002.2", "step-00000003"]),
        (Order.TIME, ["step-00000002", "step-00000003", "step-00000002.2"]),
    ):
        code, out, _ = call(capsys, "ckpt", "recover", root, "--order", order)
        assert code == 0
        assert out.endswith(f"the newest is {names[-1]}\n")
        assert [commit.name for commit in read_commits(root)] == names
        (root / "COMMITTED").unlink()


def test_copies_of_one_time_are_in_the_order_of_their_steps_and_saves(tmp_path):
    for step in (2,) * 10 + (1,):
        save(tmp_path, step)
    for path in tmp_path.glob("step-*/manifest.json"):
        os.utime(path, (10, 10))
    (tmp_path / "COMMITTED").unlink()
    names = [each.name for each in recover(tmp_path)]
    assert names == ["step-00000001", "step-00000002", *(f"step-00000002.{n}" for n in range(2, 11))]


def test_a_step_that_is_saved_again_gets_a_number_above_those_that_are_listed(tmp_path):
    """Bug: it got that of one that was removed, and recovery by steps took an older one for the newest."""
    save(tmp_path, 2)
    save(tmp_path, 2)
    save(tmp_path, 2, keep=1)
    save(tmp_path, 2)
    (tmp_path / "COMMITTED").unlink()
    names = [each.name for each in recover(tmp_path, order=Order.STEP)]
    assert names == ["step-00000002.3", "step-00000002.4"]
    save(tmp_path, 2)
    assert read_commits(tmp_path)[-1].name == "step-00000002.5"


def test_a_folder_that_cannot_be_read_is_its_own_problem(root, capsys, unreadable):
    """Bug: it ended all, and was said not to be writable."""
    unreadable("step-00000003/manifest.json", errno.EIO)
    (root / "COMMITTED").unlink()
    code, out, _ = call(capsys, "ckpt", "recover", root)
    assert code == 0
    assert re.search(r"step-00000003/manifest.json cannot be read: Input/output error", out)
    assert "the newest is step-00000002.2" in out
    assert (root / "damaged-step-00000003" / "manifest.json").exists()


@pytest.mark.parametrize("name", [COMMITTED, "manifest.json", "tensors.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM])
def test_an_error_of_this_process_is_no_damage(root, capsys, unreadable, name, number):
    """Bug: with too many files open, a sound checkpoint was renamed to damaged-NAME and left out."""
    before = set(os.listdir(root))
    (root / COMMITTED).write_bytes(b"{}")
    unreadable(name, number)
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert code == 2
    assert re.search(
        rf"{re.escape(name)} could not be read: {os.strerror(number)}\..* which may be whole", err
    )
    assert set(os.listdir(root)) - {".lock"} == before


def test_a_list_that_the_disk_does_not_give_back_is_made_anew(root, capsys, unreadable):
    unreadable(COMMITTED, errno.EIO)
    code, out, _ = call(capsys, "ckpt", "recover", root, "--order", "time")
    assert (code, out.endswith("the newest is step-00000002.2\n")) == (0, True)


def test_a_folder_that_is_a_link_is_told_as_one(root, tmp_path, capsys):
    """Bug: it was said to be missing and listed, after all was read through the link."""
    (root / "COMMITTED").unlink()
    (root / "step-00000003").rename(tmp_path / "elsewhere")
    (root / "step-00000003").symlink_to(tmp_path / "elsewhere")
    code, out, _ = call(capsys, "ckpt", "recover", root)
    assert code == 0
    assert re.search(r"step-00000003 is a link\..* It is now damaged-step-00000003", out)
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_nothing_is_listed_where_nothing_is_whole(root, capsys):
    for path in root.glob("step-*/manifest.json"):
        path.unlink()
    (root / "COMMITTED").unlink()
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert code == 8
    assert "has no checkpoint that is whole" in err
    assert not (root / "COMMITTED").exists()
    assert len(list(root.glob("step-*"))) == 4


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_where_there_are_drafts_and_nothing_else_it_says_how_to_begin_anew(tmp_path, capsys, num_drafts):
    """Bug: no checkpoint was whole, it said, as if there were damaged ones; and each run sent back to it."""
    for step in range(num_drafts):
        (tmp_path / f"step-0000000{step}.tmp-12ab").mkdir()
    if num_drafts == 0:
        (tmp_path / COMMITTED).write_bytes(b"{}")
    before = set(os.listdir(tmp_path))
    code, _, err = call(capsys, "ckpt", "recover", tmp_path)
    assert code == 8
    assert "has no checkpoint, whole or damaged" in err
    assert ("drafts of saves that did not end: step-00000000.tmp-12ab" in err) == (num_drafts > 0)
    assert ("step-00000002.tmp-12ab and 2 more." in err) == (num_drafts > 3)
    assert set(os.listdir(tmp_path)) - {".lock"} == before
    subprocess.run(re.search(r"rm -rf .*", err)[0], shell=True, check=True)
    save(tmp_path, 1)
    assert len(read_commits(tmp_path)) == 1


def test_drafts_beside_a_list_that_has_no_checkpoint_yet_are_told(tmp_path, capsys):
    write_commits(tmp_path, (), disk=Disk())
    assert "No save there has ended.\n" in call(capsys, "ckpt", "recover", tmp_path)[2]
    (tmp_path / "step-00000001.tmp-12ab").mkdir()
    code, _, err = call(capsys, "ckpt", "recover", tmp_path)
    assert code == 2
    assert "drafts of saves that did not end: step-00000001.tmp-12ab; the next save removes them." in err


def test_a_list_of_a_version_to_come_is_left_alone(root, capsys):
    listed = root / "COMMITTED"
    listed.write_text(listed.read_text().replace('"version": 1', '"version": 2'))
    for words in (["ls"], ["recover"]):
        code, _, err = call(capsys, "ckpt", *words, root)
        assert code == 8
        assert "is of version 2 of the format" in err
        assert "recover" not in err


def test_a_checkpoint_of_a_version_to_come_ends_it_before_anything_is_changed(root, capsys):
    """Bug: the list left it out, and the next run removed it."""
    manifest = root / "step-00000003" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    (root / "step-00000001" / "state.json").unlink()
    (root / "COMMITTED").unlink()
    code, _, err = call(capsys, "ckpt", "recover", root)
    assert code == 8
    assert "step-00000003/manifest.json is of version 2 of the format" in err
    assert not (root / "COMMITTED").exists()
    assert len(list(root.glob("step-*"))) == 4
