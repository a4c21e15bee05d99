"""MLflow: where ``MLFLOW_TRACKING_URI`` says, or in MLflow's default store."""

import os
from collections.abc import Mapping
from typing import Any

from shardwright.observe.trackers.tracker import Run, plain_name

__all__ = ["MlflowTracker"]

_LONGEST_VALUE = 500  # of a parameter, in every store


class MlflowTracker:
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
        """Logs the numbers of a step."""
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, plain_name(name), value, step=step)

    def close(self) -> None:
        """Ends the run there."""
        self._client.set_terminated(self._run_id)
