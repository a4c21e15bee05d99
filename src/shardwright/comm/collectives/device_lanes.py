"""Runs the hops of a collective on device streams.

::

    turn       0        1        2        3
    across  chunk 0  chunk 1  chunk 2                     hop 0, here that of an all-gather
    inside           chunk 0  chunk 1  chunk 2            hop 1

All ranks issue all hops in this one order, whichever could begin first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.futures import Future

from shardwright.comm._private import has_nccl, nccl_group
from shardwright.comm.collectives.ordered_thread import OrderedThread

Lane = Literal["across", "inside"]
"""The groups of a rank: those with its place on each node, and its own node."""
LANES: tuple[Lane, ...] = ("across", "inside")


@dataclass(frozen=True, slots=True)
class Hop:
    """The operation of a hop on each chunk.

    Attributes:
        do: issues it, for the chunk of a number.
    """

    lane: Lane
    do: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Hops:
    """A collective on one rank.

    Attributes:
        hops: that each chunk makes one after the other.
    """

    hops: Sequence[Hop]
    num_chunks: int

    def in_order(self) -> Iterator[tuple[Hop, int]]:
        """The hops of all chunks, in the order in which they are issued.

        >>> gather = Hops([Hop("across", print), Hop("inside", print)], 2)
        >>> [(hop.lane, chunk) for hop, chunk in gather.in_order()]
        [('across', 0), ('across', 1), ('inside', 0), ('inside', 1)]
        """
        for turn in range(self.num_chunks + len(self.hops) - 1):
            for number, hop in enumerate(self.hops):
                if 0 <= turn - number < self.num_chunks:
                    yield hop, turn - number


def spans(count: int, chunk: int) -> list[tuple[int, int]]:
    """The spans of the chunks.

    >>> spans(5, 2), spans(5, 0)
    ([(0, 2), (2, 4), (4, 5)], [(0, 5)])
    """
    step = chunk or count
    return [(start, min(start + step, count)) for start in range(0, count, step)]


# Before kernels that wait for a free place: others need what a collective brings.
_HIGH_PRIORITY = -1

_Work: Any = dist.Work


class _DeviceLanes(Protocol):
    """Runs hops, each group's in the order in which they are issued."""

    def run(self, hops: Hops, results: list[Tensor], *, reads: list[Tensor], waits: bool) -> dist.Work:
        """Issues a collective."""

    def join(self) -> None:
        """Puts what the caller does next behind all collectives before."""

    def shared(self, tensor: Tensor) -> Tensor:
        """Says of a tensor that was made in a hop that both lanes use it."""


class StreamLanes:
    """Hops on two streams of each device, so that the chunks of both groups go at the same time.

    ::

        caller  ──●                         ●──▶     wait() of the work
                  ├▶ across ─ 0 ─ 1 ─ 2 ┐   │
                  └▶ inside ───── 0 ─ 1 ┴ 2 ┘        a chunk's next hop waits for its event

    Nothing here waits on the host.
    """

    def __init__(self, cuda: Any = torch.cuda):
        self._cuda = cuda
        self._streams: dict[torch.device, dict[str, Any]] = {}

    def run(self, hops: Hops, results: list[Tensor], *, reads: list[Tensor], waits: bool) -> dist.Work:
        device = results[0].device
        streams = self._streams_of(device)
        current = self._cuda.current_stream(device)
        for lane in LANES:
            streams[lane].wait_stream(current)
            for tensor in (*results, *reads):
                # Who lets go of it before the end must not get its memory for something else.
                tensor.record_stream(streams[lane])
        done: dict[int, Any] = {}
        # As on the thread: results count as not changed, and may be of either mode.
        with torch.inference_mode():
            for hop, chunk in hops.in_order():
                stream = streams[hop.lane]
                if chunk in done:
                    stream.wait_event(done[chunk])
                with self._cuda.stream(stream):
                    hop.do(chunk)
                done[chunk] = stream.record_event()
        # Of both lanes: who waits for the last of several collectives has them all, as with NCCL.
        ends = [streams[lane].record_event() for lane in LANES]
        return _StreamWork(ends, results, futures=streams["futures"], cuda=self._cuda)

    def join(self) -> None:
        for device, streams in self._streams.items():
            for lane in LANES:
                self._cuda.current_stream(device).wait_stream(streams[lane])

    def shared(self, tensor: Tensor) -> Tensor:
        streams = self._streams_of(tensor.device)
        for lane in LANES:
            tensor.record_stream(streams[lane])
        return tensor

    def _streams_of(self, device: torch.device) -> dict[str, Any]:
        if device not in self._streams:
            self._streams[device] = {
                name: self._cuda.Stream(device, priority=_HIGH_PRIORITY) for name in (*LANES, "futures")
            }
        return self._streams[device]


class _StreamWork(_Work):  # type: ignore[misc]
    """A collective on streams; a waiter blocks its own stream, not the host."""

    def __init__(self, ends: list[Any], tensors: list[Tensor], *, futures: Any, cuda: Any):
        super().__init__()
        self._ends = ends
        self._tensors = tensors
        self._futures = futures
        self._cuda = cuda

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Has the current stream wait; the group's own timeout counts."""
        current = self._cuda.current_stream(self._tensors[0].device)
        for end in self._ends:
            current.wait_event(end)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device is done with it."""
        return all(end.query() for end in self._ends)

    def is_success(self) -> bool:
        """As `is_completed`: where NCCL fails, its watchdog ends the process."""
        return self.is_completed()

    def exception(self) -> None:
        """None: errors of NCCL are raised when it is issued, or end the process."""

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> "Future[list[Tensor]]":
        """A future that is done at once: only the streams of its waiters, and of callbacks, wait.

        It notes where the current streams are when it gets its result.
        """
        future: Future[list[Tensor]] = Future(devices=[self._tensors[0].device])
        with self._cuda.stream(self._futures):
            self.wait()
            future.set_result(self._tensors)
        return future


class _MakeGroup(Protocol):
    """Makes a process group of some ranks; each of them calls it."""

    def __call__(self, store: Store, rank: int, num_ranks: int, *, timeout_s: float) -> dist.ProcessGroup: ...


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A type of device, and how its tensors get to other ranks.

    Attributes:
        is_present: whether this process could use it.
        make_group: makes the groups that take its tensors.
        make_lanes: makes what runs hops, for the ordered thread of a group.
    """

    device_type: str
    is_present: Callable[[], bool]
    make_group: _MakeGroup
    make_lanes: Callable[[OrderedThread], _DeviceLanes]


CUDA = Accelerator("cuda", has_nccl, nccl_group, lambda thread: StreamLanes())
