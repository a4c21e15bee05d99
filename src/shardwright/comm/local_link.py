"""Links two processes of one host: rings of shared memory, announced over a socket.

::

    capacity   ┌───────────┬───────────┬─────────────┐
               │ message 5 │ message 6 │    free     │    message 4 was read: its room is free again
               └───────────┴───────────┴─────────────┘
                 oldest

A segment has no name: its file descriptor is passed on, and the kernel frees it once no process maps it,
however the processes end.

::

    sender                                    receiver
    copies a tensor into its ring  ── Unix socket: "at 4096" ──▶  copies it out into the posted buffer
    may use the room again         ◀── Unix socket: "read"  ──

No other thread takes part. The socket also shows at once when the other process ends. An announcement never
blocks: the number of unread messages is bounded, and the socket has room for their notes. That small messages
were read is told with the next announcement, or for two at once: a note wakes the other process.
"""

import contextlib
import errno
import mmap
import os
import socket
import struct
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.comm.meeting_place import call_in, no_message
from shardwright.comm.message_names import Purpose
from shardwright.errors import PeerLostError, TraceMismatchError
from shardwright.quantities import format_bytes

# As much as any vector instruction likes; every dtype may begin there.
_ALIGNMENT = 64
_MOST_VIEWS = 64


class Segment:
    """Shared memory, mapped into this process."""

    def __init__(self, fd: int, num_bytes: int):
        try:
            self._bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._views: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}

    def at(self, offset: int, like: Tensor) -> Tensor:
        """The memory behind an offset, as a contiguous tensor of the shape and type of another."""
        key = offset, like.dtype, like.shape
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                del self._views[next(iter(self._views))]
            num_bytes = like.numel() * like.element_size()
            with torch.inference_mode(False):  # it is written to outside of it, too
                view = self._bytes[offset : offset + num_bytes].view(like.dtype).view(like.shape)
            self._views[key] = view  # steps are alike: their messages lie where those of the last one lay
        return view


class Ring:
    """The writer's side: finds room for messages that are read in the order in which they are written.

    Where a message finds no room, the ring gets a larger segment: large enough for what is unread and the
    message. It is never larger than six of the largest messages, with the four that may be unread at once: by
    then there is always room in one piece.
    """

    def __init__(self, most_unread: int):
        self._most_unread = most_unread
        self._unread: deque[tuple[int, int]] = deque()  # (offset, end) of those in the present segment
        self._unread_before = 0  # messages in segments that were given up
        self._capacity = 0

    @property
    def num_bytes(self) -> int:
        """Size of the present segment."""
        return self._capacity

    @property
    def is_full(self) -> bool:
        """Whether the reader must read a message before another can be written."""
        return self._unread_before + len(self._unread) >= self._most_unread

    def place(self, num_bytes: int) -> int | None:
        """The offset for a message, which is unread from now on; None where the segment has no room."""
        size = _aligned(num_bytes)
        offset = self._room_for(size)
        if offset is not None:
            self._unread.append((offset, offset + size))
        return offset

    def grow(self, num_bytes: int) -> int:
        """Replaces the segment by one with room for this message and the unread ones."""
        size = _aligned(num_bytes)
        capacity = size + sum(end - offset for offset, end in self._unread)
        if capacity <= self._capacity:  # there is room, but in two pieces
            capacity = self._capacity + size
        fd = os.memfd_create("shardwright-messages", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, capacity)  # else the lack of memory would show as a fatal signal later
        except OSError:
            os.close(fd)
            raise
        self.give_up()
        self._capacity = capacity
        return fd

    def give_up(self) -> None:
        """Leaves the present segment to the messages that are unread; the next message needs a new one."""
        self._capacity = 0
        self._unread_before += len(self._unread)
        self._unread.clear()

    def read(self) -> None:
        """The reader has read the oldest message."""
        if self._unread_before:
            self._unread_before -= 1
        else:
            self._unread.popleft()

    def _room_for(self, size: int) -> int | None:
        if not self._unread:
            return 0 if size <= self._capacity else None
        oldest, (_, newest_end) = self._unread[0][0], self._unread[-1]
        if newest_end > oldest:
            if newest_end + size <= self._capacity:
                return newest_end
            return 0 if size <= oldest else None
        return newest_end if newest_end + size <= oldest else None


def _aligned(num_bytes: int) -> int:
    """Room for a message; an empty one takes some too, so that no two begin at the same place."""
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT


# Messages that are written and not yet read, at most.
_MOST_UNREAD = 4

# Messages up to so many bytes may be read without a word, at most so many at a time.
_READ_UNTOLD, _SMALL_BYTES = 1, 64 * 1024

# Kind, purpose (of a message), messages read since the last note, size in bytes (of a message or a segment),
# offset (of a message).
_NOTE = struct.Struct("=BBBQQ")
_ROOM_FOR_FD = socket.CMSG_SPACE(4)
_MESSAGE, _READ, _SEGMENT = range(3)
_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)


class LocalReceipt:
    """An expected tensor; `arrived` says whether it has come."""

    __slots__ = ("arrived", "purpose", "tensor")

    def __init__(self, tensor: Tensor, purpose: Purpose = Purpose.PIPELINE):
        self.tensor = tensor
        self.purpose = purpose
        self.arrived = False


class LocalLink:
    """This process's end of the way to and from one other process.

    Attributes:
        ended: it has ended, and all that it said before was heard.
    """

    def __init__(self, connection: socket.socket, peer: int):
        self.peer = peer
        self.ended = False
        self._socket = connection
        self._close = weakref.finalize(self, connection.close)
        self._ring = Ring(_MOST_UNREAD)
        self._segments: deque[Segment] = deque()  # the oldest that has unread messages comes first
        self._written: deque[tuple[Segment, int, int, int]] = deque()  # (segment, offset, bytes, purpose)
        self._posted: deque[LocalReceipt] = deque()
        self._own_segment: Segment | None = None
        self._read_untold = 0

    @property
    def fd(self) -> int:
        """Becomes readable when the other process has something to say, or has ended."""
        return self._socket.fileno()

    @property
    def num_bytes(self) -> int:
        """Shared memory for the messages that this process sends."""
        return self._ring.num_bytes

    @property
    def is_full(self) -> bool:
        """Whether the other process must read something, as far as was heard, before more can be written."""
        return self._ring.is_full

    def close(self) -> None:
        """Releases the connection to the other process, and the memory."""
        self._close()
        self.ended = True
        self.shrink()
        for queue in (self._posted, self._written, self._segments):
            queue.clear()

    def shrink(self) -> None:
        """Releases the memory for future messages; the next one gets as much as it needs."""
        self._ring.give_up()
        self._own_segment = None

    # ---- sending ----

    def write(self, tensor: Tensor, purpose: Purpose = Purpose.PIPELINE) -> bool:
        """Copies a tensor for the other process; False where it must read something before."""
        num_bytes = tensor.numel() * tensor.element_size()
        offset = self._place(num_bytes)
        if offset is None:
            self.listen()  # the other process may have read something meanwhile
            if self.is_full:
                return False
            offset = self._place(num_bytes)
        if offset is None:
            self._renew(num_bytes)
            offset = self._place(num_bytes)
        assert offset is not None
        assert self._own_segment is not None
        view = self._own_segment.at(offset, tensor)
        view.copy_(tensor.detach())  # it is kept, and must have no history
        self._say(_MESSAGE, num_bytes, offset, purpose=purpose)
        return True

    def _place(self, num_bytes: int) -> int | None:
        return None if self.is_full else self._ring.place(num_bytes)

    def _renew(self, num_bytes: int) -> None:
        try:
            fd = self._ring.grow(num_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no shared memory for a message of {format_bytes(num_bytes)} to rank {self.peer}: "
                f"{error.strerror}. Use more microbatches, which are smaller, or set shared_memory: false",
            ) from error
        copy = os.dup(fd)
        try:
            self._own_segment = Segment(fd, self._ring.num_bytes)
            self._say(_SEGMENT, self._ring.num_bytes, fds=[copy])
        finally:
            os.close(copy)

    def _say(
        self, kind: int, num_bytes: int = 0, offset: int = 0, *, purpose: int = 0, fds: Sequence[int] = ()
    ) -> None:
        try:
            # Where the other process has ended, `listen` sees it: after all that it had said before.
            note = _NOTE.pack(kind, purpose, self._read_untold, num_bytes, offset)
            if fds:
                attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
                self._socket.sendmsg([note], attached)
            else:
                self._socket.send(note)
            self._read_untold = 0
        except OSError as error:
            raise PeerLostError(f"sending to rank {self.peer} failed: {error}", rank=self.peer) from error

    # ---- receiving ----

    def post(self, receipt: LocalReceipt) -> None:
        """Names the tensor for the next message that has none yet."""
        self._posted.append(receipt)

    def listen(self, *, once: bool = False) -> None:
        """Reads everything that the other process has said; its next word alone if ``once``."""
        is_enough = False
        while not (self.ended or is_enough):
            is_enough = once
            try:
                note, attached, _, _ = self._socket.recvmsg(_NOTE.size, _ROOM_FOR_FD, _AT_ONCE)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it ended without hearing all that we said; what it said before is still there
            if not note:
                self.ended = True
                return
            kind, purpose, num_read, num_bytes, offset = _NOTE.unpack(note)
            for _ in range(num_read):
                self._ring.read()
            if kind == _MESSAGE:
                self._written.append((self._segments[-1], offset, num_bytes, purpose))
            elif kind == _READ:
                continue
            elif attached:
                ((_, _, fd),) = attached
                self._segments.append(Segment(int.from_bytes(fd, sys.byteorder), num_bytes))
            else:
                raise OSError(
                    errno.EMFILE,
                    f"no file descriptor is left for the memory of rank {self.peer}; allow more (ulimit -n)",
                )

    def deliver(self) -> None:
        """Copies what was written into the tensors that were posted for it."""
        while self._posted and self._written:
            receipt = self._posted.popleft()
            segment, offset, num_bytes, purpose = message = self._written.popleft()
            expected = receipt.tensor.numel() * receipt.tensor.element_size()
            if (num_bytes, purpose) != (expected, receipt.purpose):
                raise TraceMismatchError(self._mismatch(receipt, *message))
            receipt.tensor.copy_(segment.at(offset, receipt.tensor))
            receipt.arrived = True
            while self._segments[0] is not segment:
                self._segments.popleft()
            self._read_untold += 1
            if num_bytes > _SMALL_BYTES or self._read_untold > _READ_UNTOLD:
                with contextlib.suppress(PeerLostError):  # it has ended, and needs no room any more
                    self._say(_READ)

    def _mismatch(
        self, receipt: LocalReceipt, segment: Segment, offset: int, num_bytes: int, purpose: int
    ) -> str:
        """The error for another message than the one waited for."""
        if purpose == Purpose.MEETING and receipt.purpose != Purpose.MEETING:
            call = call_in(segment.at(offset, no_message()))
            return (
                f"rank {self.peer} calls {call}, and this rank does not: it takes {receipt.purpose}. "
                f"Call {call} on every rank, in the same order, and not under `if sw.rank() == 0:`."
                f"{_OF_UNEVEN_DATA if receipt.purpose in _BEGIN_STEPS else ''}"
            )
        shape, dtype = tuple(receipt.tensor.shape), receipt.tensor.dtype
        expected = receipt.tensor.numel() * receipt.tensor.element_size()
        return (
            f"rank {self.peer} sent {Purpose(purpose)} ({num_bytes} bytes) where this rank takes "
            f"{receipt.purpose} ({shape} of {dtype}: {expected} bytes). The ranks are at different places of "
            "the script: call the step functions, optimizer.step(), model.state_dict(), clip_grad_norm_ and "
            "sw.barrier on all ranks, in the same order, and not under `if sw.rank() == 0:`."
            f"{_OF_UNEVEN_DATA if purpose in _BEGIN_STEPS and receipt.purpose == Purpose.MEETING else ''}"
        )


_BEGIN_STEPS = (Purpose.BATCH, Purpose.AGREEMENT)
_OF_UNEVEN_DATA = (
    " A rank whose loop ended early ran out of data: give all ranks as many batches (sw.data_loader does)."
)
