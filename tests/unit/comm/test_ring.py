"""The ring in shared memory never gives room away that is not free."""

import os
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from shardwright.comm.local_link import Ring

MOST_UNREAD = 4
LARGEST = 1000
READ, GIVE_UP = "read", "give up"


class Writer:
    """Writes with a ring, and remembers what the reader has not read: (segment, offset, end)."""

    def __init__(self):
        self.ring = Ring(MOST_UNREAD)
        self.unread = deque()
        self.segment = 0
        self.num_grown = 0

    def write(self, num_bytes):
        offset = self.ring.place(num_bytes)
        if offset is None:
            before = self.ring.num_bytes
            fd = self.ring.grow(num_bytes)
            assert os.fstat(fd).st_size == self.ring.num_bytes > before
            os.close(fd)
            self.segment += 1
            self.num_grown += 1
            offset = self.ring.place(num_bytes)
        assert 0 <= offset <= offset + num_bytes <= self.ring.num_bytes
        assert offset % 64 == 0
        message = (self.segment, offset, offset + max(1, num_bytes))
        for segment, start, end in self.unread:
            assert segment != message[0] or end <= message[1] or message[2] <= start
        self.unread.append(message)

    def read(self):
        self.ring.read()
        self.unread.popleft()


actions = st.lists(st.one_of(st.just(READ), st.just(GIVE_UP), st.integers(0, LARGEST)), max_size=60)


@given(actions)
def test_unread_messages_do_not_overlap(actions):
    writer = Writer()
    for action in actions:
        assert writer.ring.is_full == (len(writer.unread) >= MOST_UNREAD)
        if action == GIVE_UP:
            writer.ring.give_up()
            assert writer.ring.num_bytes == 0
        elif action == READ:
            if writer.unread:
                writer.read()
        else:
            if writer.ring.is_full:
                writer.read()
            writer.write(action)
