"""Links two processes of one host: messages in shared memory, announced over a socket.

::

    sender                                    receiver
    copies a tensor into its ring  ── Unix socket: "at 4096" ──▶  copies it out into the posted buffer
    may use the room again         ◀── Unix socket: "read"  ──

No other thread takes part. The socket also shows at once when the other process ends. An announcement never
blocks: the number of unread messages is bounded, and the socket has room for their notes.
"""

import contextlib
import errno
import os
import socket
import struct
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from shardwright.comm.absence.meeting_message import call_in, no_message
from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.one_host.shared_memory import Ring, Segment
from shardwright.errors import PeerLostError, TraceMismatchError
from shardwright.quantities import format_bytes

__all__ = ["LocalLink", "LocalReceipt"]

# Messages that are written and not yet read, at most.
_MOST_UNREAD = 4

# Kind, purpose (of a message), size in bytes (of a message or a segment), offset (of a message).
_NOTE = struct.Struct("=BBQQ")
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
        peer: world rank of the other process.
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
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            # Where the other process has ended, `listen` sees it: after all that it had said before.
            self._socket.sendmsg([_NOTE.pack(kind, purpose, num_bytes, offset)], attached)
        except OSError as error:
            raise PeerLostError(f"sending to rank {self.peer} failed: {error}", rank=self.peer) from error

    # ---- receiving ----

    def post(self, receipt: LocalReceipt) -> None:
        """Names the tensor for the next message that has none yet."""
        self._posted.append(receipt)

    def listen(self) -> None:
        """Reads everything that the other process has said."""
        while not self.ended:
            try:
                note, attached, _, _ = self._socket.recvmsg(_NOTE.size, _ROOM_FOR_FD, _AT_ONCE)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it ended without hearing all that we said; what it said before is still there
            if not note:
                self.ended = True
                return
            kind, purpose, num_bytes, offset = _NOTE.unpack(note)
            if kind == _MESSAGE:
                self._written.append((self._segments[-1], offset, num_bytes, purpose))
            elif kind == _READ:
                self._ring.read()
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
            )
        shape, dtype = tuple(receipt.tensor.shape), receipt.tensor.dtype
        expected = receipt.tensor.numel() * receipt.tensor.element_size()
        return (
            f"rank {self.peer} sent {Purpose(purpose)} ({num_bytes} bytes) where this rank takes "
            f"{receipt.purpose} ({shape} of {dtype}: {expected} bytes). The ranks are at different places of "
            "the script: call the step functions, model.state_dict(), clip_grad_norm_ and sw.barrier on all "
            "ranks, in the same order, and not under `if sw.rank() == 0:`."
        )
