"""Messages between two processes of one host: through shared memory, announced over a socket.

::

    sender                                    receiver
    copies a tensor into its ring  ── Unix socket: "at 4096" ──▶  copies it out into the posted buffer
    may use the room again         ◀── Unix socket: "read"  ──

No other thread takes part. The socket also shows at once when the other process ends.
"""

import contextlib
import os
import socket
import struct
import sys
import weakref
from collections import deque

from torch import Tensor

from shardwright.comm.shared_memory import Ring, Segment
from shardwright.errors import PeerLostError

__all__ = ["LocalLink", "LocalReceipt"]

# Messages that are written and not yet read, at most.
_MOST_UNREAD = 4

# Kind, offset (of a message) or size (of a segment).
_NOTE = struct.Struct("=BQ")
_ROOM_FOR_FD = socket.CMSG_SPACE(4)
_MESSAGE, _READ, _SEGMENT = range(3)


class LocalReceipt:
    """A tensor that is to come; `arrived` says whether it has."""

    __slots__ = ("arrived", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.arrived = False


class LocalLink:
    """This process's end of the way to and from one other process.

    Args:
        connection: a connected Unix socket that keeps packets apart.
        peer: world rank of the other process.
    """

    def __init__(self, connection: socket.socket, peer: int):
        self.peer = peer
        self.ended = False
        self._socket = connection
        self._close = weakref.finalize(self, connection.close)
        self._ring = Ring(_MOST_UNREAD)
        self._segments: deque[Segment] = deque()  # the oldest that has unread messages comes first
        self._written: deque[tuple[Segment, int]] = deque()
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

    def close(self) -> None:
        """Lets go of the other process."""
        self._close()
        self.ended = True

    # ---- sending ----

    def write(self, tensor: Tensor) -> bool:
        """Copies a tensor for the other process; False where it must read something before.

        Raises:
            PeerLostError: the other process has ended.
        """
        if self._ring.is_full:
            return False
        num_bytes = tensor.numel() * tensor.element_size()
        offset = self._ring.place(num_bytes)
        if offset is None:
            self._renew(num_bytes)
            offset = self._ring.place(num_bytes)
            assert offset is not None
        assert self._own_segment is not None
        self._own_segment.at(offset, tensor).copy_(tensor)
        self._say(_MESSAGE, offset)
        return True

    def _renew(self, num_bytes: int) -> None:
        fd = self._ring.grow(num_bytes)
        copy = os.dup(fd)
        try:
            self._own_segment = Segment(fd, self._ring.num_bytes)
            self._say(_SEGMENT, self._ring.num_bytes, copy)
        finally:
            os.close(copy)

    def _say(self, kind: int, number: int, *fds: int) -> None:
        try:
            if fds:
                socket.send_fds(self._socket, [_NOTE.pack(kind, number)], list(fds))
            else:
                self._socket.send(_NOTE.pack(kind, number))
        except OSError as error:
            self.ended = True
            raise PeerLostError(f"sending to rank {self.peer} failed: {error}", rank=self.peer) from error

    # ---- receiving ----

    def post(self, receipt: LocalReceipt) -> None:
        """Names the tensor into which the next message goes that has none yet."""
        self._posted.append(receipt)

    def listen(self) -> None:
        """Takes note of all that the other process has said."""
        while not self.ended:
            try:
                note, attached, _, _ = self._socket.recvmsg(_NOTE.size, _ROOM_FOR_FD, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it ended without hearing all that we said; what it said before is still there
            except OSError:
                note, attached = b"", []
            if not note:
                self.ended = True
                return
            kind, number = _NOTE.unpack(note)
            if kind == _MESSAGE:
                self._written.append((self._segments[-1], number))
            elif kind == _READ:
                self._ring.read()
            else:
                ((_, _, fd),) = attached
                self._segments.append(Segment(int.from_bytes(fd, sys.byteorder), number))

    def deliver(self) -> None:
        """Copies what was written into the tensors that were posted for it."""
        while self._posted and self._written:
            receipt = self._posted.popleft()
            segment, offset = self._written.popleft()
            receipt.tensor.copy_(segment.at(offset, receipt.tensor))
            receipt.arrived = True
            while self._segments[0] is not segment:
                self._segments.popleft()
            with contextlib.suppress(PeerLostError):  # it has ended, and needs no room any more
                self._say(_READ, 0)
