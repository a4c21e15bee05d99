"""Gloo's own collectives, behind our interface."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.collectives.reduction import Reduction
from shardwright.errors import UsageError

__all__ = ["gloo_can", "run_gloo", "start_gloo"]

# Of these it knows how to reduce them.
_SUMMED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


def gloo_can(collective: str, dtype: torch.dtype, reduction: Reduction) -> bool:
    """Whether gloo has a collective for elements of a type; it copies any."""
    if collective in ("all_gather", "broadcast"):
        return True
    return dtype in _SUMMED and reduction.name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def run_gloo(
    group: dist.ProcessGroup, collective: str, data: Tensor, output: Tensor, reduction: Reduction, source: int
) -> None:
    """Runs a collective to its end; the arguments are those of `start_gloo`."""
    start_gloo(group, collective, data, output, reduction, source).wait()


def start_gloo(
    group: dist.ProcessGroup, collective: str, data: Tensor, output: Tensor, reduction: Reduction, source: int
) -> dist.Work:
    """Starts a collective."""
    op: Any = dist.ReduceOp.SUM if reduction.name == "AVG" else getattr(dist.ReduceOp, reduction.name)
    if collective == "all_gather":
        return group._allgather_base(output.view(torch.uint8), data.view(torch.uint8))
    if collective == "reduce_scatter":
        scattering = dist.ReduceScatterOptions()
        scattering.reduceOp = op
        return group._reduce_scatter_base(output, data, scattering)
    if collective == "all_reduce":
        reducing = dist.AllreduceOptions()
        reducing.reduceOp = op
        return group.allreduce([output], reducing)
    if collective == "broadcast":
        telling = dist.BroadcastOptions()
        telling.rootRank = source
        return group.broadcast([output if output.dtype in _SUMMED else output.view(torch.uint8)], telling)
    raise UsageError(f"there is no collective {collective!r}.")
