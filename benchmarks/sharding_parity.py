"""Losses of a small GPT in float32, through DDP and through Shardwright, on the same tokens."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sharding_ranks import GPT, contender_of, tokens_of

__all__ = ["losses_of_ddp", "losses_of_ours"]

_BATCH = 16


def _mean(loss: float) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def losses_of_ddp(steps: int) -> list[float]:
    """The mean loss over all ranks, step by step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(blocks=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss: Tensor = model(tokens_of(step, parts=dist.get_world_size(), part=dist.get_rank(), batch=_BATCH))
        loss.backward()
        optimizer.step()
        found.append(_mean(loss.item()))
    return found


def losses_of_ours(steps: int, settings: dict[str, Any]) -> list[float]:
    """The same with Shardwright."""
    import shardwright.torch as sw

    train = contender_of(
        f"ours-{settings['sharded_data_parallel_degree']}", blocks=2, profile="estimated", **settings
    )
    return [
        _mean(train(tokens_of(step, parts=sw.dp_size(), part=sw.dp_rank(), batch=_BATCH)))
        for step in range(steps)
    ]
