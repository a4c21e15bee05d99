"""Buckets start in one order, whatever the order in which gradients come.

Sums of the rows of a rank, where gradients are reduced in every backward.
"""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardwright.comm.collectives import shardwright_process_group
from shardwright.torch.replicas.bucket_order import BucketOrder
from shardwright.torch.replicas.gradient_buckets import ShardedBucket


class Noted:
    """A bucket that notes when it starts."""

    def __init__(self, name, size, started, *, late=False):
        self.late = late
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
    order = BucketOrder(buckets, is_last=is_last)
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
    order = BucketOrder(buckets)
    for bucket in buckets:
        order.is_there(bucket.members[0].parameter)
        assert sum(other.holds for other in buckets) <= 2
        assert bucket.holds


def test_late_buckets_hold_up_those_behind_until_the_end():
    started = []
    early, late, behind = (
        Noted(name, 1, started, late=name == "late") for name in ("early", "late", "behind")
    )
    order = BucketOrder([early, late, behind])
    for bucket in (behind, late, early):
        order.is_there(bucket.members[0].parameter)
    assert started == [("early", True)]
    order.start_rest()
    assert started == [("early", True), ("late", True), ("behind", True)]


def test_an_earlier_sum_goes_once_it_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it stayed to the next backward, so that two ranks had as much as of whole gradients."""

    def reduce_scatter(output: Any, data: Any, **_: Any) -> Any:
        output.copy_(data)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(shardwright_process_group, "reduce_scatter_single", reduce_scatter)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    holder = torch.zeros(2, 3)
    sharded = SimpleNamespace(holder=holder, part_shape=(2, 3), spec=None, gradient=None)
    member: Any = SimpleNamespace(holder=holder, sharded=sharded)
    group: Any = object()
    bucket = ShardedBucket([member], group, None)
    earlier = None
    for number in range(3):
        holder.grad = torch.full((2, 3), 1.0)
        bucket.start(is_last=number == 2)
        (work,) = bucket._work
        if number:
            assert earlier is not None
            bucket.let_go()
            assert earlier() is None
        earlier = weakref.ref(work._sum)
        del work
    bucket.finish(1.0)
    assert torch.equal(sharded.gradient, torch.full((2, 3), 3.0))
