"""Jobs that are processes of this machine: logs, failures, limits, stops. Launchers are shell commands."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from shardwright.errors import ConfigError, LaunchError
from shardwright.launch.engines.engine import HostCommand, ProcessesJob, prepared_run_folder
from shardwright.launch.job_spec import JobSpec
from shardwright.launch.processes import ExitLog, WorkerExit
from shardwright.launch.running_job import exits_file


@pytest.fixture
def start(tmp_path, monkeypatch):
    started = []

    def begin(*scripts, **changes):
        spec = JobSpec(
            **{
                "name": "one",
                "entry_point": "train.py",
                "source_dir": tmp_path,
                "runs_dir": tmp_path / "runs",
                "num_hosts": len(scripts),
                **changes,
            }
        )
        commands = [HostCommand(["sh", "-c", script], {"PATH": os.environ["PATH"]}) for script in scripts]
        with prepared_run_folder(spec) as lock:
            started.append(ProcessesJob(spec, commands, ends_with_parent=True, lock=lock))
        return started[-1]

    yield begin
    for job in started:
        with contextlib.suppress(LaunchError, UserWarning):
            job.stop()
            job.wait(logs=False)


def worker_exit(rank, code, at_s, error=""):
    return WorkerExit(
        rank=rank,
        local_rank=0,
        life=0,
        exit_code=code,
        at_s=at_s,
        seconds=1.0,
        error=error,
        log=f"rank{rank}.log",
    )


def test_what_hosts_print_is_shown_line_by_line(start, capsys):
    job = start("echo from one; printf half; sleep 0.3; echo ' a line'", "echo from two >&2; printf no-end")
    job.wait()
    assert sorted(capsys.readouterr().out.replace("no-end", "no-end\n").splitlines()) == [
        *("from one", "from two", "half a line", "no-end")
    ]
    assert (job.status, job.exit_code, job.name, job.job_name) == ("Completed", 0, "one", "one")
    assert job.describe()["TrainingJobStatus"] == "Completed"


def test_a_launcher_that_fails_is_told_with_its_last_lines(start):
    job = start("for i in $(seq 40); do echo line $i; done; exit 2")
    with pytest.raises(LaunchError) as caught:
        job.wait(logs=False)
    text = str(caught.value)
    assert text.startswith("training job one failed (exit code 2). its launcher wrote:\nline 26\n")
    assert text.endswith(f"line 40\nlogs: {job.spec.logs}")
    assert (caught.value.exit_code, job.status) == (2, "Failed")
    assert job.describe()["FailureReason"].startswith("its launcher wrote:")


def test_of_several_hosts_the_rank_that_failed_first_is_named(start):
    job = start("sleep 0.1; exit 5", "sleep 0.2; exit 6")
    lost = "Traceback\n  File x\nshardwright.errors.PeerLostError: receiving from rank 2 failed"
    ExitLog(exits_file(job.spec, 0)).append(worker_exit(0, 1, 10.0, lost))
    ExitLog(exits_file(job.spec, 1)).append(worker_exit(2, -9, 10.5))
    with pytest.raises(
        LaunchError, match=r"\(exit code 5\)\. rank 2 failed first, after 1.00 s: killed by SIGKILL"
    ):
        job.wait(logs=False)


def test_a_host_that_does_not_notice_is_stopped(start, monkeypatch):
    monkeypatch.setattr("shardwright.launch.engines.engine._NOTICE_S", 0.2)
    job = start("exit 3", "trap '' TERM; while true; do sleep 0.05; done")
    before_s = time.monotonic()
    with pytest.raises(LaunchError, match=r"exit code 3"):
        job.wait(logs=False)
    assert time.monotonic() - before_s < 30


def test_a_job_over_its_time_is_stopped(start):
    job = start("sleep 60", max_run_s=0.2)
    with pytest.raises(LaunchError, match=r"max_run is 0\.2 s, and they are over"):
        job.wait(logs=False)
    assert job.status == "Failed"


def test_a_job_can_be_stopped(start):
    job = start("sleep 60")
    assert job.status == "InProgress"
    job.stop()
    with pytest.warns(UserWarning, match="training job one was stopped before its end"):
        job.wait(logs=False)
    assert job.status == "Stopped"


def test_a_rank_that_saved_is_no_failure_of_the_script(start):
    with pytest.raises(
        LaunchError, match=r"saved its state and asks to be started again, under the same job_name"
    ):
        start("exit 75").wait(logs=False)


def test_ctrl_c_is_passed_on_and_the_end_awaited(start, tmp_path):
    job = start("trap 'touch saved; exit 75' TERM; touch ready; while true; do sleep 0.05; done")

    before = signal.getsignal(signal.SIGINT)

    def interrupt():
        while not (tmp_path / "ready").exists() or signal.getsignal(signal.SIGINT) is before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        job.wait(logs=False)
    assert (tmp_path / "saved").exists()
    assert job.exit_code == 75


def test_a_command_that_is_not_there(tmp_path):
    spec = JobSpec(name="one", entry_point="x.py", source_dir=tmp_path, runs_dir=tmp_path / "runs")
    start = HostCommand(["/none"], {})
    with (
        pytest.raises(LaunchError, match=r"the launcher of one cannot be started: No such file"),
        prepared_run_folder(spec) as lock,
    ):
        ProcessesJob(spec, [start], ends_with_parent=True, lock=lock)
    (tmp_path / "file").touch()
    elsewhere = JobSpec(name="one", entry_point="x.py", source_dir=tmp_path, runs_dir=tmp_path / "file")
    with (
        pytest.raises(LaunchError, match=r"cannot be made: Not a directory\. Set output_path"),
        prepared_run_folder(elsewhere),
    ):
        pass


def test_the_folder_is_kept_as_long_as_a_launcher_runs(tmp_path):
    """Also where the process that has started it has ended, as with `fit(wait=False)`."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from shardwright.launch.engines.engine import prepared_run_folder\n"
        "from shardwright.launch.engines.engine import HostCommand, ProcessesJob\n"
        "from shardwright.launch.job_spec import JobSpec\n"
        "folder = Path(sys.argv[1])\n"
        "spec = JobSpec(name='one', entry_point='x.py', source_dir=folder, runs_dir=folder / 'runs')\n"
        "with prepared_run_folder(spec) as lock:\n"
        "    ProcessesJob(spec, [HostCommand(['sh', '-c', 'while [ ! -e end ]; do sleep 0.05; done'],\n"
        "        dict(os.environ))], ends_with_parent=False, lock=lock)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    spec = JobSpec(name="one", entry_point="x.py", source_dir=tmp_path, runs_dir=tmp_path / "runs")
    with pytest.raises(ConfigError, match="a training job one goes on"), prepared_run_folder(spec):
        pass
    (tmp_path / "end").touch()
    limit_s = time.monotonic() + 30
    while True:
        with contextlib.suppress(ConfigError), prepared_run_folder(spec):
            break
        assert time.monotonic() < limit_s
        time.sleep(0.02)
