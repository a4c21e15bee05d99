"""The most bytes that are in use at a time: of PyTorch's CPU allocator, or of the whole heap."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

__all__ = ["HeapBytes", "LiveBytes"]

_COUNTED = "the steps that count"
_EVERY_S = 1e-3


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


class HeapBytes:
    """What all threads have of the C library's heap, looked at every millisecond.

    PyTorch's profiler, and so `LiveBytes`, does not see what other threads free: those that run collectives.
    Here everything counts that came after it was opened, Python's objects included, and peaks that last less
    than a millisecond may be missed.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.mallinfo2.restype = _Mallinfo
        self._before = self.peak = 0

    def __enter__(self) -> "HeapBytes":
        gc.collect()
        self._before = self._now()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Nothing is open."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What runs inside of it counts."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_EVERY_S):
                self.peak = max(self.peak, self._now() - self._before)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _now(self) -> int:
        info = self._library.mallinfo2()
        return int(info.uordblks) + int(info.hblkhd)


class _Mallinfo(ctypes.Structure):
    """As malloc.h has it."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]
