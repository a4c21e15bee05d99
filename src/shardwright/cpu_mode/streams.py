"""Streams and events: work on the CPU is done when the call returns, so nobody has to wait for it."""

import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from shardwright.cpu_mode import _private
from shardwright.cpu_mode.devices import index_of, is_cuda

__all__ = [
    "CURRENT",
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "put_in_force",
    "set_stream",
]


class _Current(threading.local):
    device = 0
    stream: "Stream | None" = None


_NUMBERS = itertools.count(1)
# Of torch.Stream's `device_type`.
_CUDA = 1

CURRENT = _Current()
"""The current device and stream: each thread has its own."""


def put_in_force() -> None:
    """Has `torch.Stream` and `torch.Event` make those of CUDA where they are asked to."""
    _private.intercept_calls(torch.Stream, _made_for_cuda(Stream))
    event = _made_for_cuda(lambda device=None, **options: Event(**options))
    _private.intercept_calls(torch.Event, event)


def _made_for_cuda(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        device = args[0] if args else kwargs.get("device")
        # Without a device PyTorch takes the accelerator; with a number, a stream that there is.
        if is_cuda(device) or (device is None and "stream_id" not in kwargs):
            return make(*args, **kwargs)
        return plain(*args, **kwargs)

    return made


class Event(torch.Event):
    """A moment; for `torch.cuda.Event`. Functions of PyTorch's core see one of the CPU.

    Args:
        enable_timing, blocking, interprocess, external: taken, without a meaning here.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Makes one that is not recorded yet."""
        return super().__new__(cls, "cpu")

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

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another."""
        end_s: float | None = end_event._at_s
        if self._at_s is None or end_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_s - self._at_s) * 1e3

    def query(self) -> bool:
        """Whether all work before it is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Has a stream wait for it."""

    def synchronize(self) -> None:
        """Waits for it."""


class Stream(torch.Stream):
    """An order of work; for `torch.cuda.Stream` and `torch.cuda.ExternalStream`.

    Args:
        device: a CUDA device; by default the current one.
        priority: taken, without a meaning here.
        stream_id: its number, by which streams are equal; 0 for that of a device, by default a new one.
    """

    def __new__(
        cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any
    ) -> Self:
        """Makes one."""
        index = index_of(device, current=CURRENT.device)
        number = next(_NUMBERS) if stream_id is None else stream_id
        return super().__new__(cls, stream_id=number, device_index=index, device_type=_CUDA)

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
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

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
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


def default_stream(device: Any = None) -> Stream:
    """The stream of a device that nobody has made."""
    return Stream(device, stream_id=0)


def current_stream(device: Any = None) -> Stream:
    """The current stream."""
    if CURRENT.stream is None:
        CURRENT.stream = default_stream(device)
    return CURRENT.stream


def set_stream(stream: Stream | None) -> Stream:
    """Makes a stream the current one, and returns the one before; None changes nothing."""
    before = current_stream()
    if stream is not None:
        CURRENT.stream = stream
    return before
