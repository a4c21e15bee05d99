"""Streams and events: work on the CPU is done when the call returns, so nobody has to wait for it."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from shardwright.cpu_mode import _private
from shardwright.cpu_mode.devices import index_of, is_cuda

__all__ = ["CURRENT", "Event", "Stream", "StreamContext", "current_stream", "put_in_force", "set_stream"]


class _Current(threading.local):
    device = 0
    stream: "Stream | None" = None


CURRENT = _Current()
"""The current device and stream: each thread has its own."""


def put_in_force() -> None:
    """Has `torch.Stream` and `torch.Event` make those of CUDA where they are asked to."""
    _private.intercept_calls(torch.Stream, _made_for_cuda(Stream))
    event = _made_for_cuda(lambda device=None, **options: Event(**options))
    _private.intercept_calls(torch.Event, event)


def _made_for_cuda(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Without a device PyTorch takes the accelerator.
        if not (args or kwargs) or is_cuda(args[0] if args else kwargs.get("device")):
            return make(*args, **kwargs)
        return plain(*args, **kwargs)

    return made


class Event:
    """A moment; for `torch.cuda.Event`.

    Args:
        enable_timing, blocking, interprocess, external: taken, without a meaning here.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ):
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Notes the present moment."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to another."""
        if self._at_s is None or end_event._at_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at_s - self._at_s) * 1e3

    def query(self) -> bool:
        """Whether all work before it is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Has a stream wait for it."""

    def synchronize(self) -> None:
        """Waits for it."""


class Stream:
    """An order of work; for `torch.cuda.Stream` and `torch.cuda.ExternalStream`.

    Args:
        device: a CUDA device; by default the current one.
        priority: taken, without a meaning here.
    """

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        self.device = torch.device("cuda", index_of(device, current=CURRENT.device))
        self.device_index = self.device.index
        self.priority = priority
        self.cuda_stream = 0

    def query(self) -> bool:
        """Whether all its work is done."""
        return True

    def synchronize(self) -> None:
        """Waits for its work."""

    def wait_event(self, event: Any) -> None:
        """Has later work wait for an event."""

    def wait_stream(self, stream: Any) -> None:
        """Has later work wait for that of another stream."""

    def record_event(self, event: Event | None = None) -> Event:
        """Notes the present moment in an event, by default a new one."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        self._before = set_stream(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_stream(self._before)


class StreamContext:
    """Makes a stream the current one; for `torch.cuda.stream`.

    Args:
        stream: None leaves the current one.
    """

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        self._before = current_stream()
        set_stream(self.stream)

    def __exit__(self, *exc_info: object) -> None:
        set_stream(self._before)


def current_stream(device: Any = None) -> Stream:
    """The current stream."""
    if CURRENT.stream is None:
        CURRENT.stream = Stream(device)
    return CURRENT.stream


def set_stream(stream: Stream | None) -> Stream:
    """Makes a stream the current one, and returns the one before; None changes nothing."""
    before = current_stream()
    if stream is not None:
        CURRENT.stream = stream
    return before
