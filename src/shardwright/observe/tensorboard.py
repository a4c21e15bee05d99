"""Copies metrics to TensorBoard under the same names; ``metrics.jsonl`` is the source."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from shardwright.errors import ConfigError

__all__ = ["TensorBoardWriter", "check_tensorboard"]


def check_tensorboard() -> None:
    """Refuses the setting where TensorBoard is not installed.

    Every rank asks, not only the one that writes: if that one failed alone, the others would wait for it.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard is true, but the package tensorboard is not installed. "
            "Run: pip install 'shardwright[tensorboard]', or set tensorboard false."
        )


class TensorBoardWriter:
    """Writes numbers to event files.

    Args:
        folder: where to.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_tensorboard()
        # Imported when asked for: it is an optional extra, and takes a fifth of a second.
        from tensorboard.summary import Writer

        self._writer: Any = Writer(os.fspath(folder))

    def write(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Writes the metrics that are single numbers.

        Args:
            metrics: by name.
            step: number of the step.
        """
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(str(name), value, step)
        # One step may take a minute: do not keep a person waiting for a full buffer.
        self._writer.flush()

    def close(self) -> None:
        """Closes the files."""
        self._writer.close()
