"""Synchronous collectives of a torch.distributed process group.

With gloo, the caller waits for them; with NCCL, they run on its current stream.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]


def all_gather(group: dist.ProcessGroup, output: Tensor, data: Tensor) -> None:
    """Gives every rank the inputs of all."""
    opts = AllgatherOptions()
    opts.asyncOp = False
    _end(group._allgather_base(output, data, opts))


def reduce_scatter(group: dist.ProcessGroup, output: Tensor, data: Tensor, op: Any) -> None:
    """Gives every rank its part of the sum of all inputs."""
    opts: Any = dist.ReduceScatterOptions()
    opts.reduceOp, opts.asyncOp = op, False
    _end(group._reduce_scatter_base(output, data, opts))


def all_reduce(group: dist.ProcessGroup, data: Tensor, op: Any) -> None:
    """Gives every rank the sum of all inputs, in place."""
    opts: Any = dist.AllreduceOptions()
    opts.reduceOp, opts.asyncOp = op, False
    _end(group.allreduce([data], opts))


def broadcast(group: dist.ProcessGroup, data: Tensor, source: int) -> None:
    """Gives every rank what one of them has, in place."""
    opts: Any = dist.BroadcastOptions()
    opts.rootRank, opts.asyncOp = source, False
    _end(group.broadcast([data], opts))


def _end(work: dist.Work | None) -> None:
    """Waits for a collective; NCCL gives nothing to wait for where the caller's stream does."""
    if work is not None:
        work.wait()
