"""Copies of a run's metrics for other tools; ``metrics.jsonl`` is the source.

::

    begin(run) ──► log({"train/loss": 2.3, ...}, step=1) ──► log(..., step=2) ──► ... ──► close()
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shardwright.errors import ConfigError
from shardwright.observe.metrics import MetricValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a tracker is told of a run.

    Attributes:
        name: of the run folder; "run" without one.
        folder: the run folder; None where the run writes no files.
        settings: all settings, as plain values by name.
    """

    name: str
    folder: Path | None
    settings: Mapping[str, Any]
    world_size: int


class Tracker(Protocol):
    """Receives the metrics of a run, on its first rank alone.

    What a method raises ends this tracker, with a message; the training goes on.
    """

    def begin(self, run: Run) -> None:
        """The run begins; called once, before anything else."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """A step ended.

        Args:
            metrics: single numbers by name, ``group/name(unit)``, as in ``metrics.jsonl``.
            step: its number, from 1.
        """

    def close(self) -> None:
        """The run ended; called once, also after a failure of the script."""


def plain_name(name: str) -> str:
    """A metric's name without brackets, for tools that refuse them.

    >>> [plain_name(name) for name in ("time/step(s)", "throughput/samples(1/s)", "train/loss")]
    ['time/step_s', 'throughput/samples_per_s', 'train/loss']
    """
    head, _, unit = name.rstrip(")").partition("(")
    return f"{head}_{unit.replace('1/', 'per_').replace('/', '_per_')}" if unit else head


_LONGEST_VALUE = 500  # of a parameter, in every store


class _MlflowTracker:
    """Logs to a run of MLflow, of the same name.

    ``MLFLOW_EXPERIMENT_NAME`` names its experiment ("shardwright" if unset).

    MLflow takes no brackets in names: ``time/step(s)`` is ``time/step_s`` there.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def begin(self, run: Run) -> None:
        """Begins a run there, and logs the settings as parameters."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shardwright")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run_id = self._client.create_run(number, run_name=run.name).info.run_id
        settings = {**run.settings, "world_size": run.world_size}
        parameters = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in settings.items()]
        self._client.log_batch(self._run_id, params=parameters)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, plain_name(name), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class _TensorBoardTracker:
    """Writes numbers to event files."""

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, run: Run) -> None:
        # Imported when asked for: it is an optional extra, and takes a fifth of a second.
        from tensorboard.summary import Writer

        if run.folder is None:
            raise ConfigError("TensorBoard needs a folder, and run_dir is off. Set run_dir, or leave it out.")
        self._writer = Writer(str(run.folder / "tensorboard"))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # One step may take a minute: do not keep a person waiting for a full buffer.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandbTracker:
    """Logs to a run of Weights & Biases, of the same name.

    ``WANDB_PROJECT`` names its project ("shardwright" if unset). A run that the script has begun itself is
    used, and left open.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._is_ours = False

    def begin(self, run: Run) -> None:
        import wandb

        self._is_ours = wandb.run is None
        self._run = wandb.run or wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shardwright"),
            name=run.name,
            dir=None if run.folder is None else str(run.folder),
            config={**run.settings, "world_size": run.world_size},
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Logs the numbers of a step; of a run of the script, beside its own steps."""
        if self._is_ours:
            self._run.log(dict(metrics), step=step)
        else:
            self._run.log({**metrics, "shardwright/step": step})

    def close(self) -> None:
        """Ends the run there, if it was begun here."""
        if self._is_ours:
            self._run.finish()


_NAMED: dict[str, Callable[[], Tracker]] = {
    "mlflow": _MlflowTracker,
    "tensorboard": _TensorBoardTracker,
    "wandb": _WandbTracker,
}
"""Each needs the package of its name."""


def check_installed(names: Iterable[str]) -> None:
    """Refuses trackers whose package is not installed.

    Every rank asks, not only the one that writes: if that one failed alone, the others would wait for it.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"trackers has {name}, but the package {name} is not installed. Run: pip install "
                f"'shardwright[{name}]', or leave it out."
            )


def named_trackers(names: Iterable[str]) -> list[Tracker]:
    return [_NAMED[name]() for name in dict.fromkeys(names)]


class Tracking:
    def __init__(self, run: Run, failed: Callable[[str], None]):
        self._run = run
        self._failed = failed
        self._trackers: list[Tracker] = []

    def add(self, trackers: Sequence[Tracker]) -> None:
        for tracker in trackers:
            self._trackers.append(tracker)
            self._call(tracker, "begin", self._run)

    @property
    def has_any(self) -> bool:
        return bool(self._trackers)

    def log(self, metrics: dict[str, MetricValue], *, step: int) -> None:
        """Tells all of a step; lists, with a number for each rank, stay in ``metrics.jsonl``."""
        numbers = {str(name): float(value) for name, value in metrics.items() if not isinstance(value, list)}
        for tracker in list(self._trackers):
            self._call(tracker, "log", numbers, step=step)

    def close(self) -> None:
        """Ends with all; may be called twice."""
        for tracker in list(self._trackers):
            self._call(tracker, "close")
        self._trackers = []

    def _call(self, tracker: Tracker, name: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(tracker, name)(*args, **kwargs)
        except Exception as error:  # whatever it is: a tracker must not end a training
            self._trackers.remove(tracker)
            self._failed(
                f"{type(tracker).__name__}.{name} failed, and gets no more metrics: {type(error).__name__}: "
                f"{error}. metrics.jsonl has them all."
            )
