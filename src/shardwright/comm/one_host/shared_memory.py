"""A shared-memory ring between two processes of a host: one writes messages, the other reads them.

::

    capacity   ┌───────────┬───────────┬─────────────┐
               │ message 5 │ message 6 │    free     │    message 4 was read: its room is free again
               └───────────┴───────────┴─────────────┘
                 oldest

A segment has no name: its file descriptor is passed on, and the kernel frees it once no process maps it,
however the processes end.
"""

import mmap
import os
from collections import deque

import torch
from torch import Tensor

__all__ = ["Ring", "Segment"]

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
