"""The most bytes that PyTorch's CPU allocator has given out and not taken back, at a time."""

from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["LiveBytes"]

_COUNTED = "the steps that count"


class LiveBytes:
    """Follows every block that PyTorch's CPU allocator gives out while it is open.

    Open it before the model is built: what was there before is not counted.
    """

    def __init__(self) -> None:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        self._profiler = torch.profiler.profile(activities=cpu, profile_memory=True)

    def __enter__(self) -> "LiveBytes":
        self._profiler.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._profiler.__exit__(*exc_info)

    def counted(self) -> AbstractContextManager[Any]:
        """What runs inside of it counts; to be entered once, while this is open."""
        return torch.profiler.record_function(_COUNTED)

    @property
    def peak(self) -> int:
        """The most bytes alive at a time in what counts; to be asked for once this is closed."""
        kineto = self._profiler.profiler
        assert kineto is not None
        events = kineto.kineto_results.events()
        (span,) = [event for event in events if event.name() == _COUNTED]
        blocks = sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns())
        alive = peak = 0
        for block in blocks:
            alive += block.nbytes()
            if span.start_ns() <= block.start_ns() <= span.end_ns():
                peak = max(peak, alive)
        return peak
