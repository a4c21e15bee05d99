"""The state of a whole model, on every rank, from what each rank has of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.torch.context import Context
from shardwright.torch.residency import Residency

__all__ = ["gather_state"]


def gather_state(
    state: dict[str, Any], module: nn.Module, residency: Residency, context: Context
) -> dict[str, Any]:
    """Fills in what other ranks hold; collective over the replica.

    Args:
        state: the `state_dict` of this rank.
        module: the user's module.
        residency: who holds what.
        context: the run.
    """
    full: dict[str, Any] = type(state)()
    first_names = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    by_key: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    by_key.update(module.named_buffers(remove_duplicate=False))
    for key, value in state.items():
        name = first_names.get(id(by_key[key])) if key in by_key else None
        if name is None or name not in residency.ranks or not isinstance(value, Tensor):
            full[key] = value  # the step function has registered it, on every rank
            continue
        owner = residency.ranks[name][0]
        if owner == context.pipeline_rank:
            payload = value.detach().contiguous()
        else:
            payload = torch.empty(value.shape, dtype=value.dtype, device=context.device)
        if payload.numel():
            dist.broadcast(payload, context.pipeline_ranks[owner], group=context.pipeline_group)
        full[key] = payload
    return full
