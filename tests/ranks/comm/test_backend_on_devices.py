"""Stock scripts with tensors on accelerators; gloo stands in for NCCL, and the CPU for the accelerator."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from standing_in import group_standing_in
from stock_training import gradients_of_one_process, model, own_batch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from shardwright.comm._private import has_nccl
from shardwright.comm.collectives.backend import register_backend
from shardwright.errors import UsageError
from shardwright.testing import run_ranks


def check_gradients(wrapped, whole=lambda gradient: gradient):
    expected = gradients_of_one_process(dist.get_world_size())
    for parameter, gradient in zip(wrapped.parameters(), expected, strict=True):
        torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-12, atol=1e-12)


def test_ddp():
    def train():
        group = group_standing_in("aabb")
        wrapped = DistributedDataParallel(model(), process_group=group)
        wrapped.register_comm_hook(group, default_hooks.allreduce_hook)
        wrapped(own_batch()).square().mean().backward()
        check_gradients(wrapped)
        return sorted(group.devices._groups)

    assert run_ranks(train, 4)[0] == ["across", "everyone", "inside"]


def test_what_has_no_hops_goes_over_all_ranks():
    def compare():
        group, rank, size = group_standing_in("aabb"), dist.get_rank(), dist.get_world_size()
        mine = torch.arange(3.0) + 10 * rank
        parts = [torch.zeros(3) for _ in range(size)]
        dist.all_gather(parts, mine, group=group)
        assert torch.equal(torch.stack(parts), torch.arange(3.0) + 10 * torch.arange(4.0)[:, None])
        total = torch.zeros(3)
        dist.reduce_scatter(total, parts, group=group)
        assert torch.equal(total, 4 * mine)
        dist.reduce(total, 2, group=group)
        swapped = torch.zeros(size)
        dist.all_to_all_single(swapped, torch.full((size,), float(rank)), group=group)
        assert swapped.tolist() == [0, 1, 2, 3]
        found = [torch.zeros(1) for _ in range(size)] if rank == 1 else None
        dist.gather(torch.ones(1), found, dst=1, group=group)
        told = torch.zeros(1)
        dist.scatter(told, [torch.full((1,), float(r)) for r in range(size)] if rank == 3 else None, 3, group)
        assert told.item() == rank
        if rank == 0:
            dist.send(mine, 1, group=group)
        elif rank == 1:
            dist.recv(total, 0, group=group)
            assert torch.equal(total, torch.arange(3.0))
        dist.barrier(group=group)
        objects = [None] * size
        dist.all_gather_object(objects, rank, group=group)
        assert objects == [0, 1, 2, 3]
        return sorted(group.devices._groups)

    assert "everyone" in run_ranks(compare, 4)[0]


def test_functional_collectives():
    """C++ calls these, one tensor or several at once, and with options of several types."""

    def compare():
        group = group_standing_in("aabb", None)
        rank = dist.get_rank()
        mine = torch.arange(4.0) + 10 * rank
        total = torch.arange(4.0) * 4 + 60
        assert torch.equal(funcol.all_reduce(mine, "sum", group).wait(), total)
        for data in funcol.all_reduce_coalesced([mine, mine], "sum", group):
            assert torch.equal(data.wait(), total)
        for data in funcol.all_reduce_coalesced([mine], "avg", group):
            assert torch.equal(data.wait(), total / 4)
        whole = funcol.all_gather_single(mine, 0, group).wait()
        assert torch.equal(whole.view(4, 4)[:, 0], 10 * torch.arange(4.0))
        for data in funcol.all_gather_single_coalesced([mine, mine], group):
            assert torch.equal(data.wait(), whole)
        assert torch.equal(funcol.reduce_scatter_single(whole, "sum", 0, group).wait(), 4 * mine)
        for data in funcol.reduce_scatter_single_coalesced([whole], "sum", [0], group):
            assert torch.equal(data.wait(), 4 * mine)
        return sorted(group.devices._groups)

    made = run_ranks(compare, 4)[0]
    assert made == ["across", "everyone", "inside"]


def test_tensors_on_other_devices_are_refused():
    def refuse():
        register_backend()
        group = dist.new_group(backend="shardwright")
        with pytest.raises(UsageError, match=r"takes tensors on the CPU or on cuda, .* are on meta"):
            dist.all_reduce(torch.ones(3, device="meta"), group=group)

    run_ranks(refuse, 2)


@pytest.mark.skipif(has_nccl(), reason="NCCL is here")
def test_a_job_on_the_cpu_needs_no_nccl():
    def look():
        register_backend()
        group = dist.new_group(backend="shardwright")
        assert dist.get_pg_count() == 2
        assert group._device_types == [torch.device("cpu")]
        assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        with pytest.raises(UsageError, match=r"need NCCL, but PyTorch .* Install PyTorch for the CUDA"):
            group._get_backend(torch.device("cuda"))
        dist.all_reduce(torch.ones(3), group=group)
        return group.devices._groups

    assert run_ranks(look, 2) == [{}, {}]
