"""The run folder: who makes it, what it is called, what stays when a write fails."""

import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from shardwright.errors import ConfigError
from shardwright.observe import RunFolder

NOON = datetime(2026, 11, 20, 12, 30, 5)


def create(base: Path, name: str | None = None, **environ: str) -> RunFolder:
    return RunFolder.create(base, name=name, environ=environ, now=lambda: NOON)


def test_is_named_by_time_and_holds_logs(tmp_path: Path) -> None:
    folder = create(tmp_path / "deep" / "runs")
    assert folder.path == tmp_path / "deep" / "runs" / "2026-11-20_12-30-05"
    assert [path.name for path in folder.path.iterdir()] == ["logs"]


def test_a_named_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    first = create(tmp_path, "baseline")
    first.write("config.json", "{}")
    assert create(tmp_path, "baseline") == first
    assert first.config_file.read_text() == "{}"


HOLDS = """
import sys, pathlib
from shardwright.observe import RunFolder
RunFolder(pathlib.Path(sys.argv[1])).hold(sys.argv[2])
print("holds", flush=True)
sys.stdin.read()
"""


def test_two_runs_cannot_write_one_folder_at_the_same_time(tmp_path: Path) -> None:
    folder = create(tmp_path, "baseline")
    command = [sys.executable, "-c", HOLDS, str(folder.path), "metrics"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds\n"
        folder.hold("logs")  # the other part
        for _ in range(2):
            with pytest.raises(ConfigError) as caught:
                folder.hold("metrics")
        assert f"belongs to another run that goes on (process {other.pid} on " in str(caught.value)
        other.kill()
    for _ in range(2):  # a second run of the same process goes on
        folder.hold("metrics")


def test_the_launcher_has_made_it(tmp_path: Path) -> None:
    launched = tmp_path / "made"
    (launched / "logs").mkdir(parents=True)
    folder = create(tmp_path / "other", "name", SHARDWRIGHT_RUN_DIR=str(launched))
    assert folder.path == launched
    assert not (tmp_path / "other").exists()


def test_a_run_dir_without_logs_holds_run_folders(tmp_path: Path) -> None:
    assert create(tmp_path, SHARDWRIGHT_RUN_DIR=str(tmp_path)).path.parent == tmp_path


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "nul\0"])
def test_refuses_a_name_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run_name is .*, but it must be the name of one folder"):
        create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [None, "taken"])
def test_says_where_it_cannot_be_made(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "taken").write_text("a file")
    base = tmp_path if name else tmp_path / "taken"
    with pytest.raises(ConfigError, match=r"run folder cannot be made in run_dir .* Set run_dir"):
        create(base, name)


def test_writes_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = create(tmp_path, "a")
    assert folder.write("plan.json", "old") == folder.plan_file
    with pytest.raises(UnicodeEncodeError):
        folder.write("plan.json", "new \ud800")
    assert folder.plan_file.read_text() == "old"
    assert sorted(path.name for path in folder.path.iterdir()) == ["logs", "plan.json"]
