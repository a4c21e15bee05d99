"""What torch.distributed gets: the backend ``shardwright``, and batch norm over ranks.

::

    import shardwright.torch                            # makes the name known
    torch.distributed.init_process_group("shardwright")

Stock scripts, DDP and FSDP2 then use its collectives, for tensors on the CPU and on CUDA devices.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwright.comm.message_names import BACKEND


def register_backend() -> None:
    """Makes the name known to torch.distributed; nothing happens where it is known already."""
    if dist.is_available() and not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])


def _make(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> dist.ProcessGroup:
    # Here, because few scripts need it.
    from shardwright.comm.collectives.shardwright_process_group import ShardwrightProcessGroup

    return ShardwrightProcessGroup(store, rank, num_ranks, timeout)


def normalised_over_ranks(norm: Any, x: Tensor, group: Any) -> Tensor:
    """Normalises by the mean and variance over the samples of all ranks, and follows them."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    counted = torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() / x.size(1))])
    summed = _summed(counted, group)
    count = summed[-1:]
    if x.numel() < 2 * x.size(1) and count.item() < 2:  # no look at a value where none is needed
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape} and "
            f"{count.item():.0f} on all ranks"
        )
    mean = summed[:-1] / count
    centred = wide - mean.view(shape)
    variance = _summed(centred.square().sum(dims), group) / count
    result = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.weight is not None:
        result = result * norm.weight.view(shape)
    if norm.bias is not None:
        result = result + norm.bias.view(shape)
    if norm.track_running_stats:
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            share = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.item()
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            unbiased = variance * count / (count - 1)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
    normalised: Tensor = result.to(x.dtype)
    return normalised


def _summed(x: Tensor, group: Any) -> Tensor:
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group, and in the backward that of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
