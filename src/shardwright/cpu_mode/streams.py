"""Streams and events: CPU work is done when its call returns, so no wait is needed."""

import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from shardwright.cpu_mode import _private
from shardwright.cpu_mode.tensors import index_of, is_cuda


class _Current(threading.local):
    """What is current in a thread.

    Attributes:
        streams: of each device, by its number; a device that is not here has its default stream.
    """

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


_NUMBERS = itertools.count(1)
# Of torch.Stream's `device_type`.
_CUDA = 1
# The least and the greatest, as PyTorch has them for CUDA.
_PRIORITIES = (0, -3)

CURRENT = _Current()
"""The current device and streams: each thread has its own."""


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
    """A moment; for `torch.cuda.Event`. Functions of PyTorch's core see one of the CPU."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(cls, "cpu")

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ):
        self._at_s: float | None = None
        self._device: torch.device | None = None

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """Of the stream in which it was recorded first; None before."""
        return self._device

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()
        self._device = self._device or (stream or current_stream()).device

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
    """An order of work; for `torch.cuda.Stream`."""

    cuda_stream = 0

    def __new__(
        cls,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        **kwargs: Any,
    ) -> Self:
        index = index_of(device_index if device is None else device, current=CURRENT.device)
        number = next(_NUMBERS) if stream_id is None else stream_id
        return super().__new__(cls, stream_id=number, device_index=index, device_type=_CUDA)

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        least, greatest = _PRIORITIES
        self.priority = max(min(priority, least), greatest)
        # What ``with`` blocks have entered, innermost last, each with its thread.
        self._entered: list[tuple[int, StreamContext]] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority; a lower number is the greater one."""
        return _PRIORITIES

    def query(self) -> bool:
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
        context = StreamContext(self)
        context.__enter__()
        self._entered.append((threading.get_ident(), context))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._entered:
            raise RuntimeError("a stream is left that was not entered: `with stream:` does both.")
        # A generator may leave it in another thread than that in which it has entered.
        own = [each for each in self._entered if each[0] == threading.get_ident()]
        left = (own or self._entered)[-1]
        self._entered.remove(left)
        left[1].__exit__()


class ExternalStream(Stream):
    """A stream that another library has made; for `torch.cuda.ExternalStream`."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> Self:
        return super().__new__(cls, device, stream_id=stream_ptr)

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any):
        super().__init__(device, **kwargs)
        self.cuda_stream = stream_ptr


class StreamContext:
    """Makes a stream, and its device, the current ones; for `torch.cuda.stream`."""

    def __init__(self, stream: Stream | None):
        self.stream = stream
        # Of the stream's device, then of the device that was current; of each time that it was entered.
        self._before: list[tuple[Stream, Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append((current_stream(_index(self.stream)), current_stream()))
            set_stream(self.stream)

    def __exit__(self, *exc_info: object) -> None:
        if self.stream is not None:
            for stream in self._before.pop():
                set_stream(stream)


def default_stream(device: Any = None) -> Stream:
    """The stream of a device that nobody has made."""
    return Stream(device, stream_id=0)


def current_stream(device: Any = None) -> Stream:
    """The current stream of a device, by default of the current one."""
    index = index_of(device, current=CURRENT.device)
    if index not in CURRENT.streams:
        CURRENT.streams[index] = default_stream(index)
    return CURRENT.streams[index]


def set_stream(stream: Stream | None) -> None:
    """Makes a stream that of its device, and the device the current one; None changes nothing."""
    if stream is not None:
        CURRENT.device = _index(stream)
        CURRENT.streams[CURRENT.device] = stream


def _index(stream: Any) -> int:
    """The number of a stream's device; that of the current one for a stream that is not of CUDA."""
    return index_of(getattr(stream, "device_index", None), current=CURRENT.device)
