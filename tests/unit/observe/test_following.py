"""Following a run that another process makes."""

import io
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import UsageError
from shardwright.observe import Console, MetricsLog, RunFolder, StepRecord, metrics_of
from shardwright.observe.following import Follower, Tail, newest_run, step_record
from shardwright.observe.run_record import RunRecord, RunState


def line(step: int) -> str:
    return json.dumps(
        {"step": step, "train/loss": 1.0 / step, "time/step(s)": 0.5, "throughput/tokens(1/s)": 100}
    )


class Run:
    """A run folder, a clock, and what following it prints."""

    def __init__(self, path: Path, *, state: RunState = "running", pid: int | None = None) -> None:
        (path / "logs").mkdir(parents=True)
        self.folder = RunFolder(path)
        self.now = 1000.0
        self.stream = io.StringIO()
        RunRecord(script="train.py", command="shardwright run train.py").ended_as(self.folder, state)
        holder = f"process {pid or os.getpid()} on {socket.gethostname()}"
        (path / ".metrics.lock").write_text(holder)

    def append(self, text: str) -> None:
        with self.folder.metrics_file.open("a") as file:
            file.write(text)

    def follow(self, **more: Any) -> Follower:
        console = Console(stream=self.stream, environ={})
        wall = self.folder.path.stat().st_mtime
        return Follower(self.folder, console, clock=lambda: self.now, **{"wall": lambda: wall, **more})

    @property
    def printed(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_a_line_that_is_not_whole_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\nno record\n{"ste')
    assert tail.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('p": 2}\n')
    assert tail.read() == [{"step": 2}]
    assert tail.read() == []
    # A run that begins anew moves the file of the one before away.
    path.rename(tmp_path / "metrics-1.jsonl")
    assert tail.read() == []
    path.write_text('{"step": 1, "again": true}\n')
    assert tail.read() == [{"step": 1, "again": True}]
    path.write_text("")
    assert tail.read() == []
    tail.close()


def test_the_steps_are_those_that_the_run_wrote(tmp_path: Path) -> None:
    written = StepRecord(
        step=7,
        seconds=0.25,
        samples=8,
        tokens=512,
        flops=3e9,
        loss=2.5,
        bubble_measured=0.1,
        memory_bytes=(2**30, 2**29),
        memory_limit_bytes=2**34,
    )
    found, world_size = step_record({"step": 7, **metrics_of(written, world_size=2)})
    assert found == StepRecord(
        step=7,
        seconds=0.25,
        samples=8,
        tokens=512,
        flops=3e9,
        loss=2.5,
        bubble_measured=0.1,
        memory_bytes=(2**30,),  # the largest
        memory_limit_bytes=2**34,
    )
    assert world_size == 2
    assert step_record({"step": "one"})[0] is None


def test_progress_comes_until_the_run_ends(tmp_path: Path, stack: ExitStack) -> None:
    run = Run(tmp_path / "run")
    (run.folder.config_file).write_text('{"steps": 40}')
    for step in range(1, 9):
        run.append(line(step) + "\n")
    follower = stack.enter_context(run.follow())
    follower.begin()
    assert run.printed == ["step 8 | loss 0.1250 | 100 tok/s"]
    for step in (9, 10):
        run.now += 6.0
        run.append(line(step) + "\n")
        assert follower.poll()
    # Elsewhere than on a terminal there is a line each ten seconds, over the steps since the last one.
    assert run.printed[1:] == ["step 10 | loss 0.1056 | 100 tok/s | eta 03:00"]
    run.append(line(11) + "\n")
    record = follower.record
    assert record is not None
    record.ended(run.folder, 0)
    assert not follower.poll()
    follower.end()
    assert run.printed[-1].startswith("step 11 | loss 0.0909")
    assert follower.steps == 4


@pytest.mark.parametrize("state", ["finished", "failed", "stopped", "saved"])
def test_a_run_that_has_ended(tmp_path: Path, stack: ExitStack, state: RunState) -> None:
    run = Run(tmp_path / "run", state=state)
    run.append(line(1) + "\n" + line(2) + "\n")
    follower = stack.enter_context(run.follow())
    follower.begin()
    assert not follower.poll()
    assert run.printed == ["step 2 | loss 0.5000 | 100 tok/s"]


def test_a_run_that_was_killed_has_ended(tmp_path: Path, stack: ExitStack) -> None:
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    run = Run(tmp_path / "run", pid=gone)
    follower = stack.enter_context(run.follow())
    assert follower.poll()  # it wrote just now: its first rank may be on its way
    run.now += 11.0
    assert not follower.poll()
    later = run.folder.path.stat().st_mtime + 60.0
    assert not stack.enter_context(run.follow(wall=lambda: later)).poll()


def test_a_process_of_another_host_counts_as_alive(tmp_path: Path, stack: ExitStack) -> None:
    run = Run(tmp_path / "run")
    (run.folder.path / ".metrics.lock").write_text("process 1 on somewhere-else")
    follower = stack.enter_context(run.follow())
    run.now += 3600.0
    assert follower.poll()


def test_the_newest_run_is_the_one_that_goes_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run in"):
        newest_run(tmp_path / "runs")
    for age, name in enumerate(("first", "second", "third")):
        run = Run(tmp_path / "runs" / name)
        if name != "second":
            (run.folder.path / ".metrics.lock").unlink()
        log = MetricsLog(run.folder.metrics_file, world_size=1)
        log.append(StepRecord(step=1, seconds=1.0, samples=1))
        log.close()
        for path in (run.folder.metrics_file, run.folder.path):
            os.utime(path, (age, age))
    assert newest_run(tmp_path / "runs").path.name == "second"
    (tmp_path / "runs" / "second" / ".metrics.lock").unlink()
    os.utime(tmp_path / "runs" / "second", (1, 1))
    assert newest_run(tmp_path / "runs").path.name == "third"
