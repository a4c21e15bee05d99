"""Trackers: what they are told, one that fails, and each adapter with the real library, offline."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from observe.test_observer import Run as ObservedRun
from shardwright.errors import ConfigError
from shardwright.observe import StepRecord, trackers
from shardwright.observe.trackers import Run, Tracker

STEPS = [
    StepRecord(step=1, seconds=0.5, samples=8, loss=2.5, memory_bytes=(2**30, 2**29)),
    StepRecord(step=2, seconds=0.25, samples=8, loss=2.0, update_s=0.01),
]


def train(path: Path, *, tracker: Tracker | None = None, **settings: Any) -> ObservedRun:
    """A run of two steps."""
    run = ObservedRun(path, report=False, **settings)
    if tracker is not None:
        run.observer.track([tracker])
    for record in STEPS:
        run.observer.step_done(record)
    run.observer.close()
    run.observer.close()
    return run


class Noting:
    """Notes what it is told, and fails when it is asked to."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[Any] = []
        self._fails = fails

    def begin(self, run: Run) -> None:
        self._note("begin", (run.name, run.world_size, run.settings["log_interval"]))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._note("log", (step, metrics["train/loss"], "memory/peak_by_rank(GiB)" in metrics))

    def close(self) -> None:
        self._note("close", "end")

    def _note(self, name: str, what: Any) -> None:
        self.told.append(what)
        if name == self._fails:
            raise OSError("the server is away")


def test_a_tracker_is_told_of_the_run_and_of_each_step(tmp_path: Path) -> None:
    tracker = Noting()
    train(tmp_path, tracker=tracker)
    assert tracker.told == [("run", 4, 2), (1, 2.5, False), (2, 2.0, False), "end"]


@pytest.mark.parametrize("method", ["begin", "log", "close"])
def test_a_tracker_that_fails_is_left_out_and_said(tmp_path: Path, method: str) -> None:
    failing, other = Noting(fails=method), Noting()
    run = ObservedRun(tmp_path, report=False)
    run.observer.track([failing, other])
    for record in STEPS:
        run.observer.step_done(record)
    run.observer.close()
    assert len(other.told) == 4
    assert len(failing.told) == {"begin": 1, "log": 2, "close": 4}[method]
    message = f"Noting.{method} failed, and gets no more metrics: OSError: the server is away."
    assert run.stream.getvalue().count(message) == 1
    if method != "close":
        assert [event["kind"] for event in run.events].count("tracker_failed") == 1


@pytest.mark.parametrize("prints", [True, False])
def test_every_rank_refuses_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: bool
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwright\[tensorboard\]'"):
        ObservedRun(tmp_path, prints=prints, trackers="tensorboard")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    run = train(tmp_path, trackers="tensorboard")
    assert run.folder is not None
    events = EventAccumulator(str(run.folder.tensorboard_dir))
    events.Reload()
    found = [(event.step, make_ndarray(event.tensor_proto).item()) for event in events.Tensors("train/loss")]
    assert found == [(1, 2.5), (2, 2.0)]


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = train(tmp_path, trackers="mlflow")
    assert "failed" not in run.stream.getvalue()
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("shardwright")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert found.data.params["log_interval"] == "2"
    history = client.get_metric_history(found.info.run_id, "time/step_s")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.5), (2, 0.25)]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    told: list[Any] = []
    monkeypatch.setattr(wandb.Run, "log", noting(wandb.Run.log, told))
    run = train(tmp_path, trackers="wandb")
    assert "failed" not in run.stream.getvalue()
    assert wandb.run is None, "a run that the tracker has begun is ended"
    assert [(step, metrics["train/loss"]) for metrics, step in told] == [(1, 2.5), (2, 2.0)]
    wandb.teardown()  # its service writes the last bytes when it ends
    assert run.folder is not None
    [file] = run.folder.path.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert b"train/loss" in data
    assert json.dumps("log_interval").encode()[1:-1] in data


def noting(log: Any, told: list[Any]) -> Any:
    """The same method, which notes what it is given."""

    def both(self: Any, metrics: dict[str, float], step: int | None = None) -> None:
        told.append((metrics, step))
        log(self, metrics, step=step)

    return both
