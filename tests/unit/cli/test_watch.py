"""``shardwright watch``."""

import os
import signal
import subprocess
import sys
import time

import pytest
from observe.run_folders import run_folder
from planned import planned

from cli.calling import call
from shardwright.observe import RunFolder
from shardwright.observe.run_record import RunRecord


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(run_folder(tmp_path / "runs" / "first", planned()))
    RunRecord(script="train.py", command="shardwright run train.py").ended(folder, 0)
    return folder


@pytest.mark.parametrize("words", [["runs/first"], ["first"], []])
def test_a_run_that_has_ended_prints_its_state(capsys, run, words):
    code, out, err = call(capsys, "watch", *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "run runs/first: finished; shardwright run train.py"
    assert lines[1].startswith("step 3 | loss 1.6667 | ")
    assert lines[2:4] == ["finished", "3 steps done"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/frist"], "there is no run folder runs/frist. List them: shardwright runs runs"),
        (["frist"], "there is no run folder frist. List them: shardwright runs\n"),
        (["runs/first/plan.json"], "Give the run folder: shardwright watch runs/first"),
    ],
)
def test_what_is_no_run(capsys, run, words, message):
    code, out, err = call(capsys, "watch", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_it_follows_until_ctrl_c(run):
    """A run of this process, watched by another one."""
    RunRecord(script="train.py").ended_as(run, "running")
    (run.path / ".metrics.lock").write_text(f"process {os.getpid()} on {os.uname().nodename}")
    command = [sys.executable, "-m", "shardwright", "watch", "runs/first"]
    # Who runs tests in the background may have them ignore Ctrl-C.
    watching = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert watching.stdout.readline() == "run runs/first: running\n"
        assert watching.stdout.readline().startswith("step 3 | ")
        time.sleep(0.5)
        assert watching.poll() is None
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=20)
    finally:
        watching.kill()
    assert (watching.returncode, out) == (0, "")
    assert err == "no longer watched; the run goes on: shardwright watch runs/first\n"
