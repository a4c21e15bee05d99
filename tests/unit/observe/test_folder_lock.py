"""Locks on folders: held for as long as asked for, and no longer."""

import subprocess
import sys
from pathlib import Path

from shardwright.observe.run_folder import held, hold

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
