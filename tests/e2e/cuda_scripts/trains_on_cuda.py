"""Stock training on CUDA with NCCL: DDP, FSDP, FSDP2. Prints what the last loss was."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

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
losses = [
    last_loss(ddp),
    last_loss(sharded),
    last_loss(FullyShardedDataParallel(model().cuda())),
    last_loss(FullyShardedDataParallel(model(), device_id=torch.cuda.current_device())),
]
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
