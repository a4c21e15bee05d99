"""A model that stock DDP and FSDP2 train over all ranks, and what one process makes of it."""

import torch
import torch.distributed as dist
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 5)).double()


def gradients_of_one_process(num_ranks):
    alone = model()
    torch.manual_seed(1)
    alone(torch.randn(4 * num_ranks, 8, dtype=torch.float64)).square().mean().backward()
    return [parameter.grad for parameter in alone.parameters()]


def own_batch():
    torch.manual_seed(1)
    batch = torch.randn(4 * dist.get_world_size(), 8, dtype=torch.float64)
    return batch[4 * dist.get_rank() :][:4]
