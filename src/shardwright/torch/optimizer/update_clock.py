"""Times optimizer updates."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["UpdateClock"]

_MOST_EVENTS = 64


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class UpdateClock:
    """Adds up the seconds of updates until somebody asks.

    On GPUs nothing waits for them: events are recorded, and read when they are asked for, a step later, or
    when there are many.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._any = False

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Around an update of parameters on a device."""
        self._any = True
        if device.type == "cuda":
            if len(self._events) >= _MOST_EVENTS:
                self._add_up()
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
        self._add_up()
        seconds, self._seconds = self._seconds, 0.0
        self._any = False
        return seconds

    def _add_up(self) -> None:
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._events.clear()
