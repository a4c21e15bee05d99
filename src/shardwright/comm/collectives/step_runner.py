"""Runs the steps of a collective: shared memory inside a node, messages between nodes.

::

    shared memory   |  the first, third, ...  |  the second, fourth, ...  |
    Unix sockets    "I am one step further with collective 4, an all-gather of 1024 float32"

A collective uses one half of the memory while some ranks may still read the previous one's data in the other.
"""

import contextlib
import mmap
import os
import socket
import struct
import weakref
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.collectives.steps import (
    Arrived,
    Combine,
    Copy,
    Hear,
    Left,
    Memory,
    Receive,
    Send,
    Span,
    Step,
    Tell,
)
from shardwright.comm.collectives.reduction import Reduction
from shardwright.comm.local_peers import close_in_children
from shardwright.comm.message_names import lost_peer
from shardwright.errors import PeerLostError, PeerTimeoutError, TraceMismatchError
from shardwright.quantities import format_bytes

# Number of the operation in its group, elements, kind, dtype.
_NOTE = struct.Struct("=QQ24s16s")
_READY = b"ready"


class Operation(NamedTuple):
    """The collective that a rank is in."""

    number: int
    kind: str
    num_elements: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.num_elements} {self.dtype} (number {self.number} of this group)"


class Neighbours:
    """This rank's view of its node."""

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        *,
        rank: int,
        world_ranks: Sequence[int],
        num_bytes: int,
        timeout_s: float,
    ):
        self._sockets = dict(sockets)
        self._rank = rank
        self._world_ranks = world_ranks
        self._timeout_s = timeout_s
        for connection in self._sockets.values():
            seconds = max(1, int(timeout_s))
            # The kernel ends a wait: one call to it fewer than with Python's own timeouts.
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("=qq", seconds, 0))
        self._heard: dict[int, deque[Operation]] = {peer: deque() for peer in sockets}
        self._num_heard = dict.fromkeys(sockets, 0)
        self._num_told = 0
        self._ends: deque[int] = deque([0, 0], maxlen=2)  # tells up to the end of the last two collectives
        self._operation = Operation(-1, "start", 0, "")
        self._num_begun = 0
        self._half_bytes = num_bytes // 2
        self._taken = [0, 0]  # bytes of either half that the system has given
        self._fd = self._pass_on_memory(num_bytes)
        self._memory = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)
        self._close = weakref.finalize(self, _close_all, list(self._sockets.values()), self._fd)
        close_in_children(self)

    def close(self) -> None:
        """Releases the connections to other ranks, except in other processes that have them too."""
        self._close()

    def hang_up(self) -> None:
        """Tells the other ranks, and threads of this one that listen to them, that this rank is gone."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._close()

    # ---- a collective ----

    def begin(self, operation: Operation, num_bytes: int) -> Tensor:
        """Begins a collective."""
        self._operation = operation
        for peer in self._sockets:
            while self._num_heard[peer] < self._ends[0]:
                self._listen(peer)
            # What was not waited for belongs to collectives that have ended here.
            while self._heard[peer] and self._num_heard[peer] - len(self._heard[peer]) < self._num_told:
                self._heard[peer].popleft()
        # Not every collective uses this memory.
        half = self._num_begun % 2
        self._num_begun += 1
        start = half * self._half_bytes
        if num_bytes > self._taken[half]:
            self._take(start, num_bytes)
            self._taken[half] = num_bytes
        return self._memory[start : start + num_bytes]

    def end(self) -> None:
        """Ends it: this rank uses its memory no more."""
        self._ends.append(self._num_told)

    def tell(self) -> None:
        """Tells the others that this rank is one step further."""
        self._num_told += 1
        operation = self._operation
        note = _NOTE.pack(
            operation.number, operation.num_elements, operation.kind.encode(), operation.dtype.encode()
        )
        for connection in self._sockets.values():
            # Who has ended may have got all that it needed; whoever waits for it notices.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(note)

    def hear(self, peer: int, count: int) -> None:
        """Waits until a rank is `count` steps further than it was when this collective began."""
        wanted = self._ends[-1] + count
        while self._num_heard[peer] < wanted:
            self._listen(peer)
        notes = self._heard[peer]
        theirs = notes[wanted - self._num_heard[peer] - 1 + len(notes)]
        if theirs != self._operation:
            other, own = self._world_ranks[peer], self._world_ranks[self._rank]
            raise TraceMismatchError(
                f"rank {other} is in {theirs} where rank {own} is in {self._operation}. The ranks of "
                "a group call the same collectives in the same order: look for a step that one of them "
                "skipped, for another number of microbatches, or for parameters that it has frozen."
            )

    def _listen(self, peer: int) -> None:
        self._take_note(peer, self._receive(peer, _NOTE.size))

    def _take_note(self, peer: int, note: bytes) -> None:
        number, num_elements, kind, dtype = _NOTE.unpack(note)
        operation = Operation(number, kind.rstrip(b"\0").decode(), num_elements, dtype.rstrip(b"\0").decode())
        self._heard[peer].append(operation)
        self._num_heard[peer] += 1

    def _receive(self, peer: int, num_bytes: int) -> bytes:
        while True:
            try:
                note = self._sockets[peer].recv(num_bytes)
            except ConnectionResetError:
                continue  # it ended without hearing all that we said; what it said before is still there
            except BlockingIOError:
                lost = self._world_ranks[peer]
                raise PeerTimeoutError(
                    f"{self._operation}: rank {lost} did not come within {self._timeout_s:g} s. It hangs, or "
                    "is at another place of the script; its log may tell.",
                    rank=lost,
                ) from None
            except OSError as error:
                raise self._lost(peer, str(error)) from error
            if not note:
                raise self._lost(peer, "it has ended")
            return note

    def _lost(self, peer: int, why: str) -> PeerLostError:
        lost = self._world_ranks[peer]
        return PeerLostError(f"{self._operation}: rank {lost} is lost: {why}", rank=lost)

    # ---- the memory ----

    def _take(self, start: int, num_bytes: int) -> None:
        """Has the system give memory; without this, its lack would be a fatal signal later."""
        try:
            os.posix_fallocate(self._fd, start, num_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._operation}: no shared memory of {format_bytes(num_bytes)}: {error.strerror}. Give "
                "the host more memory, or use gloo",
            ) from error

    def share(self, num_bytes: int) -> Tensor:
        """Memory of its own for the callers, which they all see; collective over the node."""
        fd = self._pass_on_memory(num_bytes, at_once=True)
        try:
            with torch.inference_mode(False):  # others shall be able to train with it
                return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        finally:
            os.close(fd)

    def _pass_on_memory(self, num_bytes: int, *, at_once: bool = False) -> int:
        """The lowest rank of the node makes memory, and passes it on: its file descriptor."""
        first = min(self._rank, *self._sockets)
        if self._rank != first:
            return self._receive_fd(first)
        fd = os.memfd_create("shardwright-collectives", os.MFD_CLOEXEC)
        attached: list[tuple[int, int, array[int]]] = []
        try:
            os.ftruncate(fd, num_bytes)
            if at_once and num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)
            attached.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd])))
        except OSError as error:
            os.close(fd)
            raise OSError(
                error.errno, f"no memory of {format_bytes(num_bytes)} for this host: {error.strerror}"
            ) from error
        finally:
            for connection in self._sockets.values():
                connection.sendmsg([_READY], attached)
        return fd

    def _receive_fd(self, first: int) -> int:
        """The file descriptor that the lowest rank passes on, behind what it has told before."""
        while True:
            message, fds, _, _ = socket.recv_fds(self._sockets[first], _NOTE.size, 1, socket.MSG_CMSG_CLOEXEC)
            if fds:
                return fds[0]
            if len(message) != _NOTE.size:
                raise self._lost(first, "it could not share memory")
            self._take_note(first, message)


def _close_all(sockets: list[socket.socket], fd: int) -> None:
    for connection in sockets:
        connection.close()
    os.close(fd)


_LARGEST_TAG = 2**31 - 1


def run_steps(
    steps: Sequence[Step],
    memories: Mapping[Memory, Tensor],
    *,
    messages: dist.ProcessGroup | None,
    neighbours: Neighbours | None,
    world_ranks: Sequence[int],
    reduction: Reduction,
    what: str,
) -> None:
    """Runs the row of one rank to its end."""
    mail = _Mail(messages, world_ranks, what)

    def at(span: Span) -> Tensor:
        return memories[span.memory][span.start : span.stop]

    for step in steps:
        match step:
            case Copy(source, target):
                data, copied = at(source), at(target)
                if data.data_ptr() != copied.data_ptr():
                    copied.copy_(data)
            case Combine(sources, target):
                reduction.combine([at(source) for source in sources], at(target))
            case Tell():
                assert neighbours is not None
                neighbours.tell()
            case Hear(peer, number):
                assert neighbours is not None
                neighbours.hear(peer, number)
            case Send(peer, span):
                mail.send(peer, at(span))
            case Receive(peer, span):
                mail.receive(peer, at(span))
            case Left(peer, number):
                mail.left(peer, number)
            case Arrived(peer, number):
                mail.arrived(peer, number)
    mail.finish()


class _Mail:
    """Messages of one collective to and from ranks of other nodes."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        world_ranks: Sequence[int],
        what: str,
    ):
        self._group = group
        self._world_ranks = world_ranks
        self._what = what
        # What another collective sends is never taken: a message larger than the memory for it would have
        # gloo end the process.
        self._tag = zlib.crc32(what.encode()) & _LARGEST_TAG
        self._sent: dict[int, list[dist.Work]] = defaultdict(list)
        self._num_left: dict[int, int] = defaultdict(int)
        self._expected: dict[int, list[dist.Work]] = defaultdict(list)
        self._num_arrived: dict[int, int] = defaultdict(int)

    def send(self, peer: int, data: Tensor) -> None:
        """Starts to send elements."""
        assert self._group is not None
        with self._naming("sending to", peer):
            self._sent[peer].append(self._group.send([data], peer, self._tag))

    def receive(self, peer: int, target: Tensor) -> None:
        """Says where the next elements of a rank go."""
        assert self._group is not None
        with self._naming("receiving from", peer):
            self._expected[peer].append(self._group.recv([target], peer, self._tag))

    def left(self, peer: int, number: int) -> None:
        """Waits until so many messages to a rank have left."""
        while self._num_left[peer] < number:
            with self._naming("sending to", peer):
                self._sent[peer][self._num_left[peer]].wait()
            self._num_left[peer] += 1

    def arrived(self, peer: int, number: int) -> None:
        """Waits until so many messages from a rank have arrived."""
        while self._num_arrived[peer] < number:
            with self._naming("receiving from", peer):
                self._expected[peer][self._num_arrived[peer]].wait()
            self._num_arrived[peer] += 1

    def finish(self) -> None:
        """Waits until everything has left."""
        for peer, works in self._sent.items():
            self.left(peer, len(works))

    @contextlib.contextmanager
    def _naming(self, doing: str, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            lost = self._world_ranks[peer]
            raise lost_peer(f"{self._what}: {doing} rank {lost} failed: {error}", rank=lost) from error
