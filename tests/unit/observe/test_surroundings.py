"""Where a run happens, and the commit of its script."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.observe.surroundings import commit_of, surroundings


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
    versions = surroundings(tmp_path / "train.py", own_version="1")["versions"]
    assert versions["accelerate"] == "1.2"
    assert "lightning" not in versions


def test_the_commit_is_gits(tmp_path: Path) -> None:
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
