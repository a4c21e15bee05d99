"""`nn.SyncBatchNorm`, which PyTorch has only for GPUs, with statistics of all ranks on the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.collectives.backend import normalised_over_ranks
from shardwright.cpu_mode import _private

__all__ = ["put_in_force"]


def put_in_force() -> None:
    """Replaces the forward."""
    if not dist.is_available():
        return
    cls: Any = nn.SyncBatchNorm
    cls.forward = _on_cpu(cls.forward)
    _private.let_ddp_take_synchronised_norms()


def _on_cpu(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def on_cpu(self: Any, input: Tensor) -> Tensor:
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        if not self.training or group is None or dist.get_world_size(group) == 1:
            return _private.PlainBatchNorm.forward(self, input)  # type: ignore[no-any-return]
        return normalised_over_ranks(self, input, group)

    return on_cpu
