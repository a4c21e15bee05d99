"""The run folder: who makes it, what it is called, what stays when a write fails.

Locks on folders: held for as long as asked for, and no longer.
"""

import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from observe.run_folders import HOLDS
from shardwright.errors import ConfigError
from shardwright.observe import RunFolder
from shardwright.observe.run_folder import held, hold

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


def test_two_runs_cannot_write_one_folder_at_the_same_time(tmp_path: Path) -> None:
    folder = create(tmp_path, "baseline")
    command = [sys.executable, "-c", HOLDS, str(folder.path)]
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


_SCRIPT = """
import pathlib, sys
from shardwright.observe.run_folder import hold
print(hold(pathlib.Path(sys.argv[1])))
"""


def _seen_by_another(path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, path], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_command_lets_go_when_it_is_done(tmp_path: Path) -> None:
    """`hold` alone kept a folder until the process ended: a notebook could not resume an import."""
    path = tmp_path / ".lock"
    with held(path) as holder:
        assert holder is None
        assert _seen_by_another(path).startswith("process ")
    assert _seen_by_another(path) == "None"


def test_what_was_held_before_is_held_afterwards(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert hold(path) is None
    with held(path) as holder:
        assert holder is None
    assert _seen_by_another(path).startswith("process ")
