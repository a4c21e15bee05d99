"""Stock training on CUDA with NCCL: DDP, FSDP, FSDP2, and a checkpoint. Prints what the last loss was."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)

assert torch.cuda.is_available(), "this script needs a GPU"
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
dist.init_process_group("nccl", device_id=device)
assert dist.is_nccl_available()
assert torch.cuda.device_count() == dist.get_world_size() == 2


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def last_loss(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    generator = torch.Generator(device="cuda").manual_seed(1 + dist.get_rank())
    x = torch.randn(4, 8, device=device, generator=generator)
    for _ in range(3):
        loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, group=dist.new_group(backend="nccl"))
    return total.item()


devices = {"device_ids": [local_rank], "output_device": local_rank}
ddp = nn.parallel.DistributedDataParallel(model().to(device), **devices)
sharded = model().cuda()
fully_shard(sharded, mesh=init_device_mesh("cuda", (2,)))
# Weights are those of the first rank.
torch.manual_seed(dist.get_rank())
synchronised = model() if dist.get_rank() == 0 else nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
synchronised = FullyShardedDataParallel(
    synchronised, device_id=torch.cuda.current_device(), sync_module_states=True
)
losses = [
    last_loss(ddp),
    last_loss(sharded),
    last_loss(FullyShardedDataParallel(model().cuda())),
    last_loss(FullyShardedDataParallel(model(), device_id=torch.cuda.current_device())),
    last_loss(FullyShardedDataParallel(model(), device_id=local_rank, cpu_offload=CPUOffload(True))),
    last_loss(synchronised),
]
with FullyShardedDataParallel.state_dict_type(synchronised, StateDictType.SHARDED_STATE_DICT):
    saved = synchronised.state_dict()
    dcp.save(saved, checkpoint_id=sys.argv[1])
    before = {name: tensor.local_tensor().clone() for name, tensor in saved.items()}
    for tensor in saved.values():
        tensor.local_tensor().zero_()
    dcp.load(saved, checkpoint_id=sys.argv[1])
assert all(torch.equal(tensor.local_tensor(), before[name]) for name, tensor in saved.items())
on_first = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FullyShardedDataParallel.state_dict_type(synchronised, StateDictType.FULL_STATE_DICT, on_first):
    gathered = synchronised.state_dict()
if dist.get_rank() == 0:
    for name, tensor in saved.items():
        own = tensor.local_tensor()
        assert torch.equal(gathered[name][: len(own)], own)
assert last_loss(synchronised) < losses[-1]
# Statistics over both ranks are those of one process with both batches.
torch.manual_seed(0)
norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
whole = copy.deepcopy(norm)
whole(torch.cat(batches)).pow(3).mean().backward()
synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(norm).cuda()
wrapped = nn.parallel.DistributedDataParallel(synchronised, **devices)
wrapped(batches[dist.get_rank()].cuda()).pow(3).mean().backward()
for ours, theirs in zip(synchronised.parameters(), whole.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
for ours, theirs in zip(synchronised.buffers(), whole.buffers(), strict=True):
    torch.testing.assert_close(ours, theirs)
# One value a channel has no variance.
said = ""
try:
    synchronised(batches[0][: dist.get_rank()])
except ValueError as error:
    said = str(error)
assert "more than 1 value per channel" in said
synchronised.eval()(batches[0])

print("losses", *(f"{loss:.6f}" for loss in losses))
dist.barrier()
dist.destroy_process_group()
