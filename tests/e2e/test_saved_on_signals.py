"""SIGTERM, SIGUSR1 and Ctrl-C save at the end of the step, end with 75, and the same command goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminal import OnTerminal

from fits import too_wide
from shardwright.checkpoint.folder import CheckpointFolder

SCRIPT = """
import sys, time, torch, shardwright.torch as sw
sw.init({"profile": "estimated", "report": False, "microbatches": 2})
torch.manual_seed(0)
model = sw.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))
optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
checkpoints = sw.Checkpoints()

@sw.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

loader = None
if len(sys.argv) > 2:  # with workers
    loader = sw.data_loader(torch.utils.data.TensorDataset(torch.ones(4000, 8)), 4, num_workers=2)
    batches = iter(loader)
step = checkpoints.resume()
print(f"begins at {step}", flush=True)
while step < 100:
    optimizer.zero_grad()
    batch = torch.ones(4, 8) * (step + 1)
    if loader is not None:
        (batch,) = next(batches)
    loss = train(model, batch).reduce_mean()
    optimizer.step()
    step += 1
    checkpoints.step_done(step)
    if sw.pp_rank() == 0 and step in (1, 3, 100):
        print(f"step {step} loss {loss.item()!r}", flush=True)
    time.sleep(0.05 if len(sys.argv) < 2 else float(sys.argv[1]))
"""


def _command(tmp_path: Path, *arguments: str, ranks: int = 2, **options: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    further = [word for name, value in options.items() for word in (f"--{name}", value)]
    where = ["-n", str(ranks), "--run-dir", str(tmp_path / "runs"), "--name", "job"]
    return [sys.executable, "-m", "shardwright", "run", *where, *further, str(script), *arguments]


def _until_it_says(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it never said {text!r}")


def _started(command: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )


def test_the_launcher_is_told(tmp_path: Path) -> None:
    """On a terminal of 80 columns, to which every line is folded."""
    job = OnTerminal(_command(tmp_path, ranks=1), tmp_path)
    job.read_until("step 3 loss")
    job.process.send_signal(signal.SIGTERM)
    assert job.read_to_end() == 75, job.text
    assert too_wide("\n".join(job.lines)) == []
    output = " ".join(" ".join(job.lines).replace("[rank 0]", "").split())
    assert "SIGTERM: saved step" in output
    assert "the ranks saved their state (exit code 75)" in output
    assert re.search(r"saved step \d+ in runs/job/checkpoints; go on: shardwright run -n 1 ", output)
    (commit,) = CheckpointFolder(tmp_path / "runs" / "job" / "checkpoints").commits()
    assert 3 <= commit.step < 100
    resumed = OnTerminal(_command(tmp_path, "0", ranks=1), tmp_path)
    assert resumed.read_to_end() == 0, resumed.text
    assert too_wide("\n".join(resumed.lines)) == []
    assert f"begins at {commit.step}" in resumed.text
    assert re.search(r"step 100 loss \S+", resumed.text)


def test_a_signal_after_the_last_step_ends_a_run_that_is_saved(tmp_path: Path) -> None:
    """It ended with 143, and "the script ended by itself", although nothing was lost."""
    command = _command(tmp_path, "0", ranks=1)
    after = "checkpoints.save(step)\nsw.shutdown()\nprint('over', flush=True)\ntime.sleep(30)\n"
    (tmp_path / "train.py").write_text(SCRIPT.replace("step < 100", "step < 3") + after)
    process = _started(command, tmp_path)
    _until_it_says(process, "over")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "stopped by SIGTERM after step 3, which is saved (exit code 75)" in output


def test_a_step_longer_than_the_grace_is_not_saved_and_it_is_said(tmp_path: Path) -> None:
    process = _started(_command(tmp_path, "30", ranks=1, grace="1"), tmp_path)
    _until_it_says(process, "step 1 loss")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "did not save in time (--grace 1)" in output
    assert CheckpointFolder(tmp_path / "runs" / "job" / "checkpoints").commits() == ()


def test_the_same_command_goes_on_without_a_launcher_of_ours(tmp_path: Path) -> None:
    """Checkpoints lay in a folder of the time, so a rerun began at step 0 without a word."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py"]
    process = _started(command, tmp_path)
    _until_it_says(process, "step 3 loss")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    saved = re.search(r"saved step (\d+) in runs/train/checkpoints; go on: python train.py", output)
    assert saved is not None, output
    resumed = _started(command, tmp_path)
    _until_it_says(resumed, f"begins at {saved[1]}")
    output, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, output
    assert "done: " in output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["train"]


@pytest.mark.sweep
def test_a_second_ctrl_c_is_immediate(tmp_path: Path) -> None:
    process = _started(_command(tmp_path, "30"), tmp_path)
    _until_it_says(process, "step 1 loss")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began_s < 10
    assert process.returncode == 128 + signal.SIGINT, output


def test_an_end_that_is_cut_short_after_the_save_is_no_failure(tmp_path: Path) -> None:
    """It was 130, and said that the state was not saved, beside the line that it was."""
    command = _command(tmp_path)
    (tmp_path / "train.py").write_text(f"import atexit, time; atexit.register(time.sleep, 30){SCRIPT}")
    process = _started(command, tmp_path)
    _until_it_says(process, "step 1 loss")
    process.send_signal(signal.SIGINT)
    _until_it_says(process, "SIGINT: saved step")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "not saved" not in output
