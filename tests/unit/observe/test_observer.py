"""One rank writes and prints; the others are silent."""

import errno
import io
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from observe.plans import measured_as, simulation, two_stage_plan
from shardwright.config import Config
from shardwright.observe import Console, Observer, RunFolder, StepRecord, read_json_lines
from shardwright.plan import Plan

WALL_S = 1_795_177_805.25


class Run:
    """An observer with its folder and what it prints."""

    def __init__(self, path: Path, *, prints: bool = True, files: bool = True, **settings: Any) -> None:
        self.folder = RunFolder.create(path, name="run", environ={}) if files else None
        self.stream = io.StringIO()
        self.observer = Observer(
            Config.parse({"log_interval": 2, **settings}),
            rank=0,
            world_size=4,
            pipeline_ranks=(0, 2),
            folder=self.folder,
            prints=prints,
            console=Console(prints=prints, stream=self.stream, environ={}),
            wall=lambda: WALL_S,
        )

    @property
    def files(self) -> list[str]:
        assert self.folder is not None
        return sorted(path.name for path in self.folder.path.iterdir() if path.is_file())

    @property
    def events(self) -> list[dict[str, Any]]:
        assert self.folder is not None
        return read_json_lines(self.folder.events_file)


def tell_everything(observer: Observer) -> None:
    observer.config_resolved(Config.parse({"partitions": 2}))
    observer.plan_made(two_stage_plan())
    observer.step_done(StepRecord(step=1, seconds=0.5, samples=8, loss=2.0))
    observer.timeline(measured_as(simulation()), simulation())
    observer.event("checkpoint_saved", num_bytes=100)
    with observer.phase("tracing the model") as phase:
        phase.update(1, total=2)
    observer.status("joining")
    observer.close()
    observer.close()


def test_the_rank_that_writes_leaves_all_files(tmp_path: Path) -> None:
    run = Run(tmp_path)
    tell_everything(run.observer)
    report = ["report.html"] * (find_spec("plotly") is not None)
    assert run.files == ["config.json", "events.jsonl", "metrics.jsonl", "plan.json", *report, "trace.json"]
    assert run.folder is not None
    assert Config.parse(json.loads(run.folder.config_file.read_text())).pipeline_parallel_degree == 2
    assert Plan.read(run.folder.plan_file) == two_stage_plan()
    assert [record["train/loss"] for record in read_json_lines(run.folder.metrics_file)] == [2.0]


def test_says_the_plan_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.folder is not None
    run.observer.plan_made(two_stage_plan())
    run.observer.plan_made(two_stage_plan())
    assert run.stream.getvalue() == (
        "plan: 1f1b, 3 microbatches, 2 stages on 2 ranks, 2 replicas; predicted step 1.20 s, bubble 25%\n"
        "  stages: embed (rank 0) | head (rank 1)\n"
        f"  why: shardwright explain {run.folder.path}\n"
    )
    assert [event["kind"] for event in run.events] == ["plan_made"]
    run.observer.close()


def test_a_plan_written_by_hand_promises_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, files=False)
    run.observer.plan_made(two_stage_plan().model_copy(update={"prediction": None, "why": ()}))
    first, *rest = run.stream.getvalue().splitlines()
    assert first == "plan: 1f1b, 3 microbatches, 2 stages on 2 ranks, 2 replicas"
    assert len(rest) == 1


def test_the_timeline_has_world_ranks_and_bytes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.observer.plan_made(two_stage_plan())
    measured = [event._replace(bytes_in_use=200) for event in measured_as(simulation())]
    run.observer.timeline(measured, simulation(), step=3)
    run.observer.close()
    assert run.folder is not None
    trace = json.loads(run.folder.trace_file.read_text())
    assert trace["otherData"] == {"step": 3}
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 2}
    held = [event["args"] for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == 0]
    assert {"bytes": 200} in held


def test_a_run_folder_that_has_gone_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.folder is not None
    run.observer.step_done(StepRecord(step=1, seconds=0.5, samples=8))
    shutil.rmtree(run.folder.path)
    for step in range(2, 5):
        run.observer.plan_made(two_stage_plan().model_copy(update={"why": (str(step),)}))
        run.observer.step_done(StepRecord(step=step, seconds=0.5, samples=8))
    run.observer.close()
    said = run.stream.getvalue()
    assert said.count("cannot be written any more: it has gone, deleted or moved. The run goes on,") == 1
    assert "done: 4 steps" in said
    assert "report" not in said


def test_only_the_rank_that_prints_looks_for_checkpoints_at_its_end(tmp_path: Path) -> None:
    asked = []
    for prints in (True, False):
        run = Run(tmp_path, prints=prints)
        run.observer.going_on = lambda prints=prints: str(asked.append(prints))
        run.observer.step_done(StepRecord(step=1, seconds=0.5, samples=8))
        run.observer.close()
    assert asked == [True]


def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    run = Run(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run.observer._metrics, "append", full)
    for step in range(1, 4):
        run.observer.step_done(StepRecord(step=step, seconds=0.5, samples=8))
    assert run.stream.getvalue().count("cannot be written any more: No space left on device.") == 1
    run.observer.close()
