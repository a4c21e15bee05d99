"""Event files of TensorBoard, in the folder ``tensorboard`` of the run."""

from collections.abc import Mapping
from typing import Any

from shardwright.errors import ConfigError
from shardwright.observe.trackers.tracker import Run

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker:
    """Writes numbers to event files."""

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, run: Run) -> None:
        """Opens the files."""
        # Imported when asked for: it is an optional extra, and takes a fifth of a second.
        from tensorboard.summary import Writer

        if run.folder is None:
            raise ConfigError("TensorBoard needs a folder, and run_dir is off. Set run_dir, or leave it out.")
        self._writer = Writer(str(run.folder / "tensorboard"))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Writes the numbers of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # One step may take a minute: do not keep a person waiting for a full buffer.
        self._writer.flush()

    def close(self) -> None:
        """Closes the files."""
        self._writer.close()
