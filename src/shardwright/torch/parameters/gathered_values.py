"""Gathers parameter values on every rank for a moment, for code between steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.torch._private import put_in_place
from shardwright.torch.parameters.remote import make_remote
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.pytorch.functions import RELEASED
from shardwright.torch.tensor_parallel.divide import shown_in_parts, shown_whole
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

__all__ = ["gathered_values"]


@contextmanager
def gathered_values(
    module: nn.Module, residency: Residency, context: Context, parts: Sequence[nn.Module | Tensor]
) -> Iterator[None]:
    """Inside, this rank has the values of some parameters and buffers, whoever holds them.

    A holder keeps what they are changed to, of a parameter that ranks share its own part; every other rank
    lets go of its copies at the end::

        rank 0 holds q     q            q, k      k.lerp_(q, 0.1)      q
        rank 1 holds k     k            q, k      k.lerp_(q, 0.1)      k, as it is now
    """
    named = dict((*module.named_parameters(), *module.named_buffers()))
    wanted = _wanted(parts, {id(tensor): name for name, tensor in named.items()}) if parts else named.keys()
    copies: list[tuple[Tensor, str]] = []
    shared: list[tuple[Tensor, DividedTensor]] = []
    try:
        for name, tensor in named.items():
            if name not in wanted or name not in residency.ranks:
                continue
            owner, away = residency.ranks[name][0], hasattr(tensor, RELEASED)
            if away:
                payload = torch.empty(tensor.shape, dtype=tensor.dtype, device=context.device)
            else:
                if isinstance(tensor, DividedTensor):
                    shared.append((tensor, shown_whole(tensor)))
                rows = tensor.full() if isinstance(tensor, ShardedTensor) else tensor
                payload = rows.detach().contiguous()
            if payload.numel():
                dist.broadcast(payload, context.pipeline_ranks[owner], group=context.groups.pipeline)
            if away:
                copies.append((tensor, name))
                _fill(tensor, payload)
        yield
    finally:
        for tensor, kept in shared:
            shown_in_parts(tensor, kept)
        for tensor, name in copies:
            holders = [context.pipeline_ranks[rank] for rank in residency.ranks[name]]
            make_remote(tensor, name, holders, device=context.device)


def _wanted(parts: Sequence[nn.Module | Tensor], names: dict[int, str]) -> set[str]:
    found = set()
    for part in parts:
        modules = (part.parameters(), part.buffers()) if isinstance(part, nn.Module) else ((part,),)
        for tensor in (tensor for group in modules for tensor in group):
            if id(tensor) not in names:
                raise UsageError(
                    f"model.gathered() gets a tensor of shape {tuple(tensor.shape)} that is no parameter and "
                    "no buffer of the wrapped model. Pass its modules (model.module.teacher) or parameters."
                )
            found.add(names[id(tensor)])
    return found


def _fill(tensor: Tensor, values: Tensor) -> None:
    """Gives a tensor without values some, for everybody who has it."""
    delattr(tensor, RELEASED)
    is_parameter = isinstance(tensor, nn.Parameter)
    if values.stride() != tensor.stride():
        laid_out = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=values.device
        )
        values = laid_out.copy_(values)
    full = nn.Parameter(values, requires_grad=tensor.requires_grad) if is_parameter else values
    put_in_place(tensor, full)
