"""Weights & Biases: online as its own variables say, or offline with ``WANDB_MODE=offline``."""

import os
from collections.abc import Mapping
from typing import Any

from shardwright.observe.trackers.tracker import Run

__all__ = ["WandbTracker"]


class WandbTracker:
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
