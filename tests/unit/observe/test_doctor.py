"""What a machine has, and what will be in the way.

What a report tells of a run besides its steps: its command, when it began.

Where a run happens, and the commit of its script.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.observe.doctor import examine
from shardwright.observe.report.facts import read_facts
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.summary import RunTotals
from shardwright.observe.surroundings import commit_of, surroundings


def test_facts(tmp_path):
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = examine(ranks | {"NCCL_DEBUG": "INFO", "HOME": "/root"}, folder=tmp_path)
    assert found.facts["torch"] == importlib.metadata.version("torch")
    assert found.facts["ranks"].startswith("rank 1 of 4")
    assert found.facts["$NCCL_DEBUG"] == "INFO"
    assert "$HOME" not in found.facts
    assert str(tmp_path) in found.facts["run folder"]
    assert found.faults == ()


def test_secrets_are_not_shown(tmp_path):
    found = examine({"SM_API_KEY": "abc", "SHARDWRIGHT_TOKEN": "def"}, folder=tmp_path)
    assert "abc" not in str(found)
    assert "def" not in str(found)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "a run would not start: RANK is set but WORLD_SIZE is not"),
        ({"OMP_NUM_THREADS": "100000"}, "OMP_NUM_THREADS is 100000, but this process may use"),
    ],
)
def test_what_will_be_in_the_way(tmp_path, environ, message):
    found = examine(environ, folder=tmp_path)
    assert any(message in problem for problem in found.problems)
    assert found.faults == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    assert any("cannot be written to" in problem for problem in examine({}, folder=tmp_path).problems)


def facts_of(tmp_path: Path, **fields: object):
    document = {"version": 1, "script": "train.py", "state": "finished", "begun_s": 1.0, **fields}
    (tmp_path / "run.json").write_text(json.dumps(document))
    return read_facts(RunFolder(tmp_path), RunTotals())


def test_a_command_without_its_secrets(tmp_path: Path) -> None:
    found = facts_of(tmp_path, command="shardwright run -n 2 train.py --hub_token=abc --seed 1")
    assert found.command == "shardwright run -n 2 train.py --hub_token=(not shown) --seed 1"
    assert found.begun == "1970-01-01 00:00 UTC"


def test_a_time_that_no_calendar_has_tells_nothing(tmp_path: Path) -> None:
    assert facts_of(tmp_path, begun_s=1e30).begun == ""


def test_packages_without_metadata_tell_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tensorflow is a module of the package tensorflow-cpu, too."""
    telling, silent = ModuleType("accelerate"), ModuleType("lightning")
    telling.__version__ = "1.2"  # type: ignore[attr-defined]

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    monkeypatch.setitem(sys.modules, "accelerate", telling)
    monkeypatch.setitem(sys.modules, "lightning", silent)
    versions = surroundings(tmp_path / "train.py", own_version="1", device="a CPU")["versions"]
    assert versions["accelerate"] == "1.2"
    assert "lightning" not in versions


def test_the_commit_is_gits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    identity = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environ = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull}

    def git(*words: str, folder: Path) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, env=environ, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    repository, inside = tmp_path / "repository", tmp_path / "repository" / "examples"
    inside.mkdir(parents=True)
    git("init", "-q", folder=repository)
    assert commit_of(inside) == ""  # there is none yet
    git("commit", "-q", "--allow-empty", "-m", "first", folder=repository)
    first = git("rev-parse", "HEAD", folder=repository)
    assert commit_of(inside) == first
    git("pack-refs", "--all", folder=repository)
    assert commit_of(inside) == first
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "other"), folder=repository)
    git("commit", "-q", "--allow-empty", "-m", "second", folder=tmp_path / "other")
    assert commit_of(tmp_path / "other") == git("rev-parse", "HEAD", folder=tmp_path / "other") != first
    git("checkout", "-q", "--detach", folder=repository)
    assert commit_of(inside) == first
    # In a container, and where a hook of another repository starts the run.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert commit_of(inside) == first
