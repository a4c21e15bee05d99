"""Only regular files are replaced, and by whole ones."""

import os
import stat
import subprocess
import sys

import pytest

from shardwright.errors import ConfigError
from shardwright.files import check_place, open_to_append, replace_file
from shardwright.observe import JsonLines
from shardwright.observe.run_folder import RunFolder, hold

from .devices import device


def test_a_device_stays_a_device(tmp_path):
    """`shardwright catalogue X -o /dev/full`, as root, made a file of the device."""
    place = tmp_path / "device"
    device(place)
    words = [sys.executable, "-m", "shardwright", "catalogue", "p4d.24xlarge", "-o", str(place)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"UsageError: --output {place} cannot be written: it is a device, and only a file is replaced.\n"
    )
    assert stat.S_ISCHR(place.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["device"]


@pytest.mark.parametrize("through_a_link", [False, True])
@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_what_is_no_file_is_left_as_it_is(tmp_path, kind, through_a_link):
    target = tmp_path / "target"
    {"device": device, "pipe": os.mkfifo, "folder": os.mkdir}[kind](target)
    place = tmp_path / "link" if through_a_link else target
    if through_a_link:
        place.symlink_to(target)
    before = (target.stat().st_ino, target.stat().st_mode)
    for write in (replace_file, open_to_append, lambda path, *_: check_place(path)):
        with pytest.raises(OSError, match=f"it is a {kind}, and only a file is replaced"):
            write(place, "text") if write is replace_file else write(place)
    assert (target.stat().st_ino, target.stat().st_mode) == before
    assert len(list(tmp_path.iterdir())) == 1 + through_a_link


def test_the_file_that_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "plan.json").write_text("old")
    (tmp_path / "link").symlink_to("folder/plan.json")
    replace_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "plan.json").read_text() == "new"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "loop", "new")


@pytest.fixture
def for_all(tmp_path, monkeypatch):
    """A folder like /tmp, and this process is not the user who puts things there."""
    folder = tmp_path / "for all"
    folder.mkdir()
    folder.chmod(0o1777)
    (tmp_path / "victim").write_text("mine")
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    if folder.stat().st_uid == (tmp_path / "victim").stat().st_uid:
        pytest.skip("it takes root to be another user")
    return folder


@pytest.mark.parametrize("target", ["victim", "nothing yet"])
def test_a_link_that_another_user_left_in_a_folder_for_all_is_not_followed(for_all, target):
    """As root, `-o /tmp/out` replaced the file that somebody's link of that name led to."""
    (for_all / "out").symlink_to(for_all.parent / target)
    (for_all.parent / "own link").symlink_to("for all/out")
    for place in (for_all / "out", for_all.parent / "own link"):
        for write in (lambda path: replace_file(path, "new"), open_to_append, check_place):
            with pytest.raises(
                PermissionError, match="a link that another user has left in a folder for all"
            ):
                write(place)
    assert sorted(path.name for path in for_all.parent.iterdir()) == ["for all", "own link", "victim"]
    assert (for_all.parent / "victim").read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_run_folder_that_another_user_left_in_a_folder_for_all_is_not_taken(for_all, kind):
    if kind == "folder":
        (for_all / "first").mkdir()
    else:
        (for_all / "first").symlink_to(for_all.parent)
    with pytest.raises(ConfigError, match=r"the run folder .*first is another user's, in a folder for all"):
        RunFolder.create(for_all, name="first", environ={})
    assert not list(for_all.rglob("logs"))


def test_permissions_are_kept_and_new_files_have_those_of_the_process(tmp_path):
    place = tmp_path / "file"
    before = os.umask(0o027)
    try:
        replace_file(place, "one")
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o640
    place.chmod(0o604)
    replace_file(place, b"two")
    assert stat.S_IMODE(place.stat().st_mode) == 0o604
    place.chmod(0o4755)
    replace_file(place, b"two")
    assert stat.S_IMODE(place.stat().st_mode) == 0o755
    assert place.read_text() == "two"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    place = tmp_path / "file"
    place.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(place, "new")
    assert place.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_run_appends_to_is_a_file(tmp_path):
    """A pipe in the place of ``metrics.jsonl`` had the run wait for a reader."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="it is a pipe"):
        JsonLines(tmp_path / "metrics.jsonl").append({"step": 1})
    os.mkfifo(tmp_path / ".logs.lock")
    with pytest.raises(OSError, match="it is a pipe"):
        hold(tmp_path / ".logs.lock")
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError, match="it is a folder"):
        RunFolder(tmp_path).write("plan.json", "{}")


def test_a_link_at_a_name_that_nobody_gave_is_replaced(tmp_path):
    """The report of a run overwrote the file to which a link of its name led."""
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").symlink_to(tmp_path / "precious")
    RunFolder(folder).write("config.json", "{}")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (folder / "config.json").read_text() == "{}"
    assert not (folder / "config.json").is_symlink()
