"""The backend with NCCL and streams, on ranks that share the first GPU."""

import os

import pytest
import torch
import torch.distributed as dist
from standing_in import group_on_hosts
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from one_gpu import on_one_gpu
from shardwright.comm._private import all_gather_single, has_nccl, reduce_scatter_single
from shardwright.comm.collective_probe import measure_device_prices
from shardwright.comm.collectives.backend import register_backend

pytestmark = [
    pytest.mark.skipif(not has_nccl(), reason="needs a GPU, and PyTorch with NCCL"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files in memory"),
]

CUDA = torch.device("cuda", 0)
# Long enough for the host to be far ahead.
LONG_CYCLES = 100_000_000


def group_of(hosts):
    register_backend()
    torch.cuda.set_device(CUDA)
    return group_on_hosts(hosts)


def data_of(rank, count):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (count,), generator=generator).float()


@pytest.mark.parametrize("hosts", ["aabb", "aaaa", "abcd", "aaab"])
def test_results_are_right_however_late_the_inputs_are(hosts):
    def compare():
        group, rank = group_of(hosts), dist.get_rank()
        for count in (1, 1001, 2_000_003):
            pieces = [data_of(other, count) for other in range(4)]
            wholes = [data_of(other, 4 * count) for other in range(4)]
            total = torch.stack(wholes).sum(0)
            piece, whole = pieces[rank].to(CUDA), wholes[rank].to(CUDA)
            for waits in (True, False):
                mine, all_mine = torch.zeros_like(piece), torch.zeros_like(whole)
                gathered, part = torch.zeros_like(whole), torch.zeros_like(piece)
                torch.cuda._sleep(LONG_CYCLES)
                mine.copy_(piece)
                all_mine.copy_(whole)
                work = all_gather_single(gathered, mine, group=group, async_op=not waits)
                if work is not None:
                    assert not work.is_completed()
                    work.wait()
                found = [gathered.clone()]
                work = reduce_scatter_single(part, all_mine, group=group, async_op=not waits)
                found.append((work.get_future().wait()[0] if work is not None else part).clone())
                work = dist.all_reduce(all_mine, group=group, async_op=not waits)
                if work is not None:
                    work.wait()
                found.append(all_mine.clone())
                dist.broadcast(mine, 2, group=group)
                expected = [torch.cat(pieces), total[rank * count :][:count], total, pieces[2]]
                for ours, right in zip([*found, mine], expected, strict=True):
                    assert torch.equal(ours.cpu(), right)
        return sorted(group.devices._groups)

    made = on_one_gpu(compare)[0]
    assert made == (["across", "everyone", "inside"] if hosts == "aabb" else ["everyone"])


def test_memory_is_not_used_again_too_early():
    def compare():
        group, rank = group_of("aabb"), dist.get_rank()
        outputs = []
        works = []
        for turn in range(10):
            output = torch.empty(4_000_000, device=CUDA)
            data = torch.full((1_000_000,), float(10 * turn + rank), device=CUDA)
            torch.cuda._sleep(LONG_CYCLES // 10)
            works.append(all_gather_single(output, data, group=group, async_op=True))
            outputs.append(output)
            del data
            torch.full((1_000_000,), -1.0, device=CUDA)  # may get its memory
        for work in works:
            work.wait()
        for turn, output in enumerate(outputs):
            expected = (10.0 * turn + torch.arange(4.0)).repeat_interleave(1_000_000)
            assert torch.equal(output.cpu(), expected)

    on_one_gpu(compare)


@pytest.mark.parametrize("name", ["SUM", "AVG", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reductions(name, dtype):
    def compare():
        group, rank = group_of("aabb"), dist.get_rank()
        stacked = torch.stack([data_of(other, 4003).to(dtype) for other in range(4)]).double()
        expected = {"SUM": stacked.sum, "AVG": stacked.mean, "MIN": stacked.amin, "MAX": stacked.amax}[name](
            0
        )
        data = data_of(rank, 4003).to(CUDA, dtype)
        dist.all_reduce(data, getattr(dist.ReduceOp, name), group=group)
        torch.testing.assert_close(data.cpu(), expected.to(dtype))

    on_one_gpu(compare)


def test_a_factor_counts_once():
    def compare():
        group = group_of("aabb")
        data = torch.ones(1000, device=CUDA)
        dist.all_reduce(data, dist._make_nccl_premul_sum(2.0), group=group)
        assert torch.equal(data.cpu(), torch.full((1000,), 8.0))

    on_one_gpu(compare)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 5)).double()


def batch_of(num_ranks):
    torch.manual_seed(1)
    return torch.randn(4 * num_ranks, 8, dtype=torch.float64)


def check_gradients(wrapped, whole=lambda gradient: gradient):
    alone = model()
    alone(batch_of(4)).square().mean().backward()
    for found, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(found.grad).cpu(), expected.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("with_hook", [False, True])
def test_ddp(with_hook):
    def train():
        group = group_of("aabb")
        wrapped = DistributedDataParallel(model().to(CUDA), device_ids=[0], process_group=group)
        if with_hook:
            wrapped.register_comm_hook(group, default_hooks.allreduce_hook)
        wrapped(batch_of(4).to(CUDA)[4 * dist.get_rank() :][:4]).square().mean().backward()
        check_gradients(wrapped)

    on_one_gpu(train)


def test_fsdp2():
    def train():
        mesh = dist.DeviceMesh.from_group(group_of("aabb"), "cuda")
        wrapped = model().to(CUDA)
        for layer in wrapped:
            fully_shard(layer, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
        wrapped(batch_of(4).to(CUDA)[4 * dist.get_rank() :][:4]).square().mean().backward()
        check_gradients(wrapped, lambda gradient: gradient.full_tensor())

    on_one_gpu(train)


def test_the_default_group_bound_to_a_device():
    """Groups of some ranks come after it: nobody may wait for the others to split a communicator."""

    def start():
        register_backend()
        torch.cuda.set_device(CUDA)
        dist.init_process_group("shardwright", device_id=CUDA)
        rank = dist.get_rank()
        pair = dist.new_group([0, 1])
        data = torch.full((5,), float(rank), device=CUDA)
        if rank < 2:
            dist.all_reduce(data, group=pair)
            assert data.tolist() == [1.0] * 5
        on_cpu = torch.ones(5)
        dist.all_reduce(on_cpu)
        assert on_cpu.tolist() == [4.0] * 5
        objects = [None] * 4
        dist.all_gather_object(objects, rank)
        assert objects == [0, 1, 2, 3]
        swapped = torch.zeros(4, device=CUDA)
        dist.all_to_all_single(swapped, torch.full((4,), float(rank), device=CUDA))
        assert swapped.tolist() == [0, 1, 2, 3]
        if rank == 2:
            dist.send(data, 3)
        elif rank == 3:
            dist.recv(data, 2)
            assert data.tolist() == [2.0] * 5
        dist.barrier(device_ids=[0])
        dist.barrier()
        dist.destroy_process_group()

    on_one_gpu(start, init_process_group=False)


def test_collectives_are_measured():
    def measure():
        group = group_of("aabb")
        prices = measure_device_prices(group.devices, CUDA, largest=2**22)
        assert "measured on cuda devices of 2 nodes x 2 ranks" in prices.source
        group.devices.prices = prices
        return group.devices.choice("all_gather", 1000, 4)

    choices = on_one_gpu(measure)
    assert choices == [choices[0]] * 4
