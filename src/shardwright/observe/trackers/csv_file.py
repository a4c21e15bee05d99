"""``metrics.csv`` in the run folder: a row for each step, for spreadsheets and pandas."""

import csv
from collections.abc import Mapping
from typing import Any, TextIO

from shardwright.errors import ConfigError
from shardwright.observe.metrics import Metric
from shardwright.observe.trackers.tracker import Run

__all__ = ["CsvTracker"]

_COLUMNS = ("step", *(metric for metric in Metric if metric is not Metric.MEMORY_BY_RANK))
"""All that any step may know: columns stay, and cells are empty where a step does not know a number."""


class CsvTracker:
    """Appends rows to ``metrics.csv``; a run that goes on appends to what is there."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._rows: Any = None

    def begin(self, run: Run) -> None:
        """Opens the file, and writes the names of the columns into a new one."""
        if run.folder is None:
            raise ConfigError(
                "metrics.csv needs a folder, and run_dir is off. Set run_dir, or leave csv out."
            )
        self._file = (run.folder / "metrics.csv").open("a", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._file, _COLUMNS, extrasaction="ignore")
        if not self._file.tell():
            self._rows.writeheader()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Writes the row of a step."""
        assert self._file is not None
        self._rows.writerow({**metrics, "step": step})
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        assert self._file is not None
        self._file.close()
