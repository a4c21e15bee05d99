"""What a tracker of metrics does: a protocol, for adapters and for classes of a script.

::

    begin(run) ──► log({"train/loss": 2.3, ...}, step=1) ──► log(..., step=2) ──► ... ──► close()
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Run", "Tracker", "plain_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a tracker is told of a run.

    Attributes:
        name: of the run folder; "run" without one.
        folder: the run folder; None where the run writes no files.
        settings: all settings, as plain values by name.
        world_size: number of ranks.
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
        """The run begins; called once, before anything else.

        Args:
            run: what it is.
        """

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
