"""All trackers of a run: one that fails is left out from then on, and said; the training goes on."""

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.observe.metrics import MetricValue
from shardwright.observe.trackers.tracker import Run, Tracker

__all__ = ["Tracking"]


class Tracking:
    """Calls trackers."""

    def __init__(self, run: Run, failed: Callable[[str], None]):
        self._run = run
        self._failed = failed
        self._trackers: list[Tracker] = []

    def add(self, trackers: Sequence[Tracker]) -> None:
        """Begins with further trackers."""
        for tracker in trackers:
            self._trackers.append(tracker)
            self._call(tracker, "begin", self._run)

    @property
    def has_any(self) -> bool:
        """Whether somebody is told."""
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
