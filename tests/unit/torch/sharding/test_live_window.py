"""What is at hand where there is no room for all."""

from hypothesis import given
from hypothesis import strategies as st

from shardwright.torch.sharding.arrivals import LiveWindow

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=7)


class Hand:
    """Does what a window says, and notices where that makes no sense."""

    def __init__(self, sizes, capacity):
        self.window = LiveWindow(sizes, capacity)
        self.sizes, self.capacity = sizes, capacity
        self.here = set()
        self.num_brought = 0

    def begin(self):
        self.here.clear()
        self._do(self.window.begin(), needed=())

    def use(self, *items):
        self._do(self.window.use(items), needed=items)
        assert set(items) <= self.here
        assert self.size() <= max(self.capacity, sum(self.sizes[item] for item in set(items)))

    def size(self):
        return sum(self.sizes[item] for item in self.here)

    def _do(self, moves, needed):
        for move in moves:
            assert (move.item in self.here) is not move.comes
            self.here ^= {move.item}
            self.num_brought += move.comes
            if move.comes:
                assert self.size() <= max(self.capacity, sum(self.sizes[item] for item in set(needed)))
            assert self.size() <= self.window.most


@given(SIZES, st.integers(1, 20), st.data())
def test_what_is_used_is_there_and_all_have_room(sizes, capacity, data):
    hand = Hand(sizes, capacity)
    item = st.integers(0, len(sizes) - 1)
    for _ in range(3):
        hand.begin()
        for items in data.draw(st.lists(st.lists(item, min_size=1, max_size=4), max_size=12)):
            hand.use(*items)


@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_a_batch_like_the_one_before_brings_no_more(num_things, capacity, data):
    """Of things of one size; with several sizes, what is best to let go is a harder question."""
    uses = data.draw(st.lists(st.integers(0, num_things - 1), max_size=16))
    hand = Hand([1] * num_things, capacity)
    brought = []
    for _ in range(3):
        before = hand.num_brought
        hand.begin()
        for item in uses:
            hand.use(item)
        brought.append(hand.num_brought - before)
    assert brought[1] <= brought[0]
    assert brought[2] == brought[1]


def test_there_and_back_keeps_what_is_used_next():
    hand = Hand([1] * 6, 3)
    for _ in range(2):
        before = hand.num_brought
        hand.begin()
        for item in (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0):
            hand.use(item)
    # The last ones stay for the way back; the others come twice.
    assert hand.num_brought - before == 9
