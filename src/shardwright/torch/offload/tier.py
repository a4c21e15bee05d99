"""A tier of memory below a device's own, and the host's pinned memory as one.

Copies run on a stream of their own, beside the stream that computes. A copy begins when the stream that
computes has come to the call, and that stream goes on behind `wait` when the copy is done::

    computes   [ unit 0 ] r0 [ unit 1 ] r1 [ unit 2 ] w0 ...        r: the copy may begin; w: it has ended
    copies                └▶[ write 0 ]  └▶[ write 1 ]│
                                      └───────────────┘ memory that unit 0 has kept is free behind w0

The Python thread waits for nothing. Memory is given back behind `wait` alone, on the stream that computes, so
that PyTorch's allocator hands it on in the right order.
"""

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.quantities import format_bytes


class Copy(Protocol):
    """One copy under way, to the tier or back."""

    @property
    def is_done(self) -> bool:
        """Whether the bytes are where they go; it does not wait."""
        ...

    def wait(self) -> None:
        """Has what computes from now on find the copy done."""
        ...

    def skip(self) -> bool:
        """Has it left out, if it has not begun; whether it will be."""
        ...

    def seconds(self) -> tuple[float, float]:
        """When it began and ended, on `time.perf_counter`; it has been waited for."""
        ...


class Tier(Protocol):
    """Takes the bytes of storages and gives them back. Copies are made in the order of the calls."""

    def reserve(self, num_bytes: int) -> None:
        """Takes room for so many bytes at once, where that can be told before anything is written."""
        ...

    def write(self, memory: Tensor) -> tuple[Any, Copy]:
        """Starts to copy bytes (a tensor of ``uint8``) to the tier; gives their place, and the copy.

        Nobody may change them, or let go of them, before the copy is done.
        """
        ...

    def read(self, place: Any, memory: Tensor) -> Copy:
        """Starts to copy the bytes of a place into memory of the device."""
        ...

    def free(self, place: Any) -> None:
        """The bytes of a place are not needed any more; a copy that reads them has been waited for."""
        ...

    def close(self) -> None:
        """Gives everything back; copies under way are waited for."""
        ...


class _StreamCopy:
    """See `Copy`."""

    __slots__ = ("_begin", "_clock", "_cuda", "_end")

    def __init__(self, cuda: Any, begin: Any, end: Any, clock: "_Clock"):
        self._cuda = cuda
        self._begin = begin
        self._end = end
        self._clock = clock

    @property
    def is_done(self) -> bool:
        """Whether the device is through with it."""
        return bool(self._end.query())

    def wait(self) -> None:
        """Has the stream that computes go on when the copy is done."""
        self._cuda.current_stream().wait_event(self._end)

    def skip(self) -> bool:
        """Does nothing: the stream has it."""
        return False

    def seconds(self) -> tuple[float, float]:
        """When it began and ended, on the clock of the host."""
        return self._clock.seconds(self._begin), self._clock.seconds(self._end)


class _Clock:
    """Puts events of a device on the clock of the host."""

    def __init__(self, cuda: Any):
        self._zero = cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def seconds(self, event: Any) -> float:
        """The time of an event; waits for it."""
        event.synchronize()
        return float(self._zero_s + self._zero.elapsed_time(event) / 1000)


class PinnedTier:
    """See `Tier`."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda, pins: bool = True):
        self._device = device
        self._cuda = cuda
        self._pins = pins
        self._stream = cuda.Stream(device)
        self._clock = _Clock(cuda)
        self._free: dict[int, list[Tensor]] = {}
        self._taken = self._most = 0  # bytes of places in use: now, and at most since there were none

    def reserve(self, num_bytes: int) -> None:
        """Nothing: places have the sizes of what is written."""

    def write(self, memory: Tensor) -> tuple[Tensor, _StreamCopy]:
        """Starts to copy bytes to the host."""
        place = self._new_place(memory.nbytes)
        return place, self._copy(place, memory)

    def read(self, place: Tensor, memory: Tensor) -> _StreamCopy:
        """Starts to copy bytes to the device."""
        return self._copy(memory, place)

    def free(self, place: Tensor) -> None:
        """Another write may take the place; the stream makes copies in order, so none is disturbed."""
        self._free.setdefault(place.nbytes, []).append(place)
        self._taken -= place.nbytes
        if not self._taken:
            # Batches of other shapes would never find places of their sizes.
            if sum(size * len(places) for size, places in self._free.items()) > 2 * self._most:
                self._stream.synchronize()
                self._free.clear()
            self._most = 0

    def close(self) -> None:
        """Gives the memory of the host back."""
        self._stream.synchronize()
        self._free.clear()

    # ---- inside ----

    def _new_place(self, num_bytes: int) -> Tensor:
        self._taken += num_bytes
        self._most = max(self._most, self._taken)
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins)
        except RuntimeError as error:
            raise UsageError(
                "activations are offloaded to the memory of the host, which has no "
                f"{format_bytes(num_bytes)} more to pin: {error}. Take more microbatches, start fewer ranks "
                "on this host, or set offload_activations to false."
            ) from error

    def _copy(self, target: Tensor, source: Tensor) -> _StreamCopy:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        # What is copied was computed, and memory that is copied to was let go of, on the current stream.
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
        return _StreamCopy(self._cuda, begin, end, self._clock)
