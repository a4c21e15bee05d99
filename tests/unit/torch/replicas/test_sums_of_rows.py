"""Sums of the rows of a rank, where gradients are reduced in every backward."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.comm.collectives import shardwright_process_group
from shardwright.torch.replicas.gradient_buckets import ShardedBucket


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
