"""How long the updates of an optimizer take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["UpdateClock"]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class UpdateClock:
    """Adds up the seconds of updates until somebody asks.

    On GPUs nothing waits for them: events are recorded, and read when they are asked for, a step later.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._any = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around an update."""
        self._any = True
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            begin, end = (_event(), _event())
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
            return
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def taken(self) -> float | None:
        """Seconds of the updates since the last call; None where there were none."""
        if not self._any:
            return None
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        self._any = False
        return seconds
