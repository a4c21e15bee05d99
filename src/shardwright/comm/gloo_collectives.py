"""Gloo's own collectives, with the interface of ours."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.reduction import Reduction
from shardwright.errors import UsageError

__all__ = ["run_gloo"]


def run_gloo(
    group: dist.ProcessGroup, collective: str, data: Tensor, output: Tensor, reduction: Reduction, source: int
) -> None:
    """Runs a collective to its end.

    Args:
        group: of gloo.
        collective: as `shardwright.collectives.COLLECTIVES` has it.
        data: the input.
        output: the output; the input where the collective is in place.
        reduction: how elements are summed; `Reduction.finish` is left to the caller.
        source: where a broadcast starts.
    """
    op: Any = dist.ReduceOp.SUM if reduction.name == "AVG" else getattr(dist.ReduceOp, reduction.name)
    if collective == "all_gather":
        work = group._allgather_base(output, data)
    elif collective == "reduce_scatter":
        scattering = dist.ReduceScatterOptions()
        scattering.reduceOp = op
        work = group._reduce_scatter_base(output, data, scattering)
    elif collective == "all_reduce":
        reducing = dist.AllreduceOptions()
        reducing.reduceOp = op
        work = group.allreduce([output], reducing)
    elif collective == "broadcast":
        telling = dist.BroadcastOptions()
        telling.rootRank = source
        work = group.broadcast([output], telling)
    else:
        raise UsageError(f"there is no collective {collective!r}.")
    work.wait()
