"""Stock scripts get Shardwright's collectives by the name of a backend."""

import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from stock_training import gradients_of_one_process, model, own_batch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwright.collectives.choose import COLLECTIVES
from shardwright.collectives.prices import DEFAULT_PRICES, Curve
from shardwright.comm.collectives.backend import register_backend
from shardwright.comm.collectives.ordered_thread import CollectiveWork
from shardwright.errors import PeerLostError, UsageError
from shardwright.testing import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files in memory")


GLOO_IS_FREE = replace(DEFAULT_PRICES, gloo=dict.fromkeys(COLLECTIVES, Curve(((0, 1e-12),))))


def group():
    register_backend()
    return dist.new_group(backend="shardwright")


def test_a_group_after_a_destroyed_one_does_not_read_its_keys():
    """The names, and so the store's keys, are those of the life before: the second one failed or hung."""

    def live_often():
        register_backend()
        found = []
        # The first subgroup of each life has the name of the one before, but not its ranks, nor their number.
        for members in ([0, 1], [1, 2], [0, 1, 2]):
            dist.init_process_group("shardwright")
            rank = dist.get_rank()
            for group_ in (dist.group.WORLD, dist.new_group(members)):
                if group_ is not dist.GroupMember.NON_GROUP_MEMBER:
                    total = torch.tensor([2.0**rank])
                    dist.all_reduce(total, group=group_)
                    found.append(total.item())
            dist.destroy_process_group()
        return found

    assert run_ranks(live_often, 3, init_process_group=False) == [
        [7, 3, 7, 7, 7],
        [7, 3, 7, 6, 7, 7],
        [7, 7, 6, 7, 7],
    ]


@pytest.mark.parametrize("by_gloo", [False, True])
def test_collectives_of_torch_distributed(by_gloo):
    def compare():
        ours, rank, size = group(), dist.get_rank(), dist.get_world_size()
        if by_gloo:
            ours.communicator.use(GLOO_IS_FREE)
        assert dist.get_backend(ours) == "shardwright"
        mine = torch.arange(10.0) + 100 * rank
        for group_ in (ours, None):
            results = []
            whole = torch.zeros(10 * size)
            dist.all_gather_single(whole, mine, group=group_)
            results.append(whole)
            parts = [torch.zeros(10) for _ in range(size)]
            dist.all_gather(parts, mine, group=group_)
            results.append(torch.stack(parts))
            part = torch.zeros(10)
            dist.reduce_scatter_single(part, whole * (rank + 1), group=group_)
            results.append(part.clone())
            dist.reduce_scatter(part, [p * (rank + 1) for p in parts], op=dist.ReduceOp.MAX, group=group_)
            results.append(part)
            total = mine.clone()
            dist.all_reduce(total, group=group_)
            results.append(total)
            mean = mine.clone()
            work = dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group_, async_op=True)
            work.wait()
            results.append(mean)
            told = mine.reshape(2, 5).t().clone(memory_format=torch.preserve_format)
            dist.broadcast(told, 1, group=group_)
            results.append(told)
            objects = [None] * size
            dist.all_gather_object(objects, {"rank": rank}, group=group_)
            assert objects == [{"rank": other} for other in range(size)]
            if group_ is ours:
                found = results
        for ours_, theirs in zip(found, results, strict=True):
            assert torch.equal(ours_, theirs)
        dist.barrier(group=ours)
        if rank == 0:
            dist.send(mine, 1, group=ours)
        elif rank == 1:
            received = torch.zeros(10)
            dist.recv(received, 0, group=ours)
            assert torch.equal(received, torch.arange(10.0))
        swapped = torch.zeros(size)
        dist.all_to_all_single(swapped, torch.full((size,), float(rank)), group=ours)
        assert swapped.tolist() == list(range(size))
        complex_ = torch.full((3,), 1 + 2j)
        dist.all_reduce(complex_, group=ours)
        assert complex_[0].item() == size * (1 + 2j)

    run_ranks(compare, 3)


def test_what_gloo_does_better_it_does_itself_beside_collectives_of_ours():
    def compare():
        ours, rank = group(), dist.get_rank()
        gloo = dict.fromkeys(("broadcast", "all_gather"), Curve(((0, 1e-12),)))
        ours.communicator.use(replace(DEFAULT_PRICES, gloo=gloo))
        told, total = torch.full((4,), float(rank)), torch.full((50_000,), 1.0 + rank)
        works = [dist.all_reduce(total, group=ours, async_op=True)]
        works.append(dist.broadcast(told, 1, group=ours, async_op=True))
        kinds = [type(work) is CollectiveWork for work in works]
        for work in reversed(works):
            work.wait()
        empty = torch.zeros(0)
        dist.broadcast(empty, 0, group=ours)
        with pytest.raises(UsageError, match="takes 4 elements and gives 12, but the output has 11"):
            ours.all_gather_single(torch.zeros(11), told).wait()
        return kinds, told.tolist(), total[-1].item()

    assert run_ranks(compare, 3) == [([True, False], [1.0] * 4, 6.0)] * 3


def test_ddp():
    def train():
        wrapped = DistributedDataParallel(model(), process_group=group())
        wrapped(own_batch()).square().mean().backward()
        for found, expected in zip(
            wrapped.parameters(), gradients_of_one_process(dist.get_world_size()), strict=True
        ):
            torch.testing.assert_close(found.grad, expected, rtol=1e-12, atol=1e-12)

    run_ranks(train, 2)


def test_fsdp2():
    def train():
        mesh = dist.DeviceMesh.from_group(group(), "cpu")
        wrapped = model()
        for layer in wrapped:
            fully_shard(layer, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
        wrapped(own_batch()).square().mean().backward()
        for found, expected in zip(
            wrapped.parameters(), gradients_of_one_process(dist.get_world_size()), strict=True
        ):
            torch.testing.assert_close(found.grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)

    run_ranks(train, 2)


def test_errors_of_asynchronous_collectives_are_raised_where_they_are_waited_for():
    def wait():
        ours = group()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_gather_single(torch.zeros(20), torch.zeros(10), group=ours, async_op=True)
        with pytest.raises(PeerLostError, match="rank 1 is lost"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            work.get_future().wait()

    outcomes = run_ranks_outcomes(wait, 2, timeout_s=20)
    assert [outcome.exit_code for outcome in outcomes] == [0, -signal.SIGKILL]


def test_ddp_with_a_communication_hook():
    """Hooks of DDP wait for futures, and ask for collectives in callbacks."""

    def train():
        ours = group()
        wrapped = DistributedDataParallel(model(), process_group=ours)
        wrapped.register_comm_hook(ours, default_hooks.allreduce_hook)
        wrapped(own_batch()).square().mean().backward()
        for found, expected in zip(
            wrapped.parameters(), gradients_of_one_process(dist.get_world_size()), strict=True
        ):
            torch.testing.assert_close(found.grad, expected, rtol=1e-12, atol=1e-12)

    run_ranks(train, 2)
