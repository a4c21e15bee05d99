"""Buckets start in one order, whatever the order in which gradients come."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from shardwright.torch.replicas.gradient_hook import BucketOrder, Turn


class Noted:
    """A bucket that notes when it starts."""

    def __init__(self, name, size, started):
        self.members = [SimpleNamespace(parameter=object()) for _ in range(size)]
        self._name, self._started = name, started
        self.holds = False

    def start(self, *, is_last):
        self._started.append((self._name, is_last))
        self.holds = True

    def let_go(self):
        self.holds = False


@given(st.lists(st.integers(1, 3), max_size=5), st.randoms(), st.booleans())
def test_the_order_is_that_of_the_turns(sizes, random, is_last):
    started = []
    buckets = [Noted(name, size, started) for name, size in enumerate(sizes)]
    order = BucketOrder([Turn(bucket) for bucket in buckets], is_last=is_last)
    for _ in range(2):
        started.clear()
        order.begin()
        parameters = [member.parameter for bucket in buckets for member in bucket.members]
        random.shuffle(parameters)
        seen = set()
        for parameter in parameters:
            order.is_there(parameter)
            order.is_there(parameter)  # once more changes nothing
            seen.add(parameter)
            complete = [all(m.parameter in seen for m in bucket.members) for bucket in buckets]
            assert len(started) == (complete.index(False) if False in complete else len(buckets))
        assert started == [(name, is_last) for name in range(len(sizes))]


@given(st.integers(0, 6))
def test_no_more_than_two_buckets_hold_whole_gradients(num_buckets):
    """A backward faster than the network had all ranks hold all gradients whole at its end."""
    buckets = [Noted(name, 1, []) for name in range(num_buckets)]
    order = BucketOrder([Turn(bucket) for bucket in buckets])
    for bucket in buckets:
        order.is_there(bucket.members[0].parameter)
        assert sum(other.holds for other in buckets) <= 2
        assert bucket.holds


def test_late_buckets_hold_up_those_behind_until_the_end():
    started = []
    early, late, behind = (Noted(name, 1, started) for name in ("early", "late", "behind"))
    order = BucketOrder([Turn(early), Turn(late, late=True), Turn(behind)])
    for bucket in (behind, late, early):
        order.is_there(bucket.members[0].parameter)
    assert started == [("early", True)]
    order.start_rest()
    assert started == [("early", True), ("late", True), ("behind", True)]
