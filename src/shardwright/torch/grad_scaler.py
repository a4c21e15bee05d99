"""Loss scaling whose verdict is the same on all ranks.

`torch.amp.GradScaler` looks for infinities in the gradients of its own rank. Over stages each rank has
other gradients, so ranks would disagree on whether to step. Here they agree before anyone steps.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.torch.context import context, is_initialized

__all__ = ["GradScaler", "adopt_scaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for models over several stages; the same arguments and methods.

    A scaler of PyTorch's own that is used in a step function becomes one of these by itself.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not is_initialized():
            return found
        current = context()
        # A rank without parameters has nothing to look at, but takes part in the verdict.
        verdicts = found or {current.device: torch.zeros_like(found_inf)}
        if current.pipeline_group is not None:
            for verdict in verdicts.values():
                dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=current.pipeline_group)
        return verdicts


def adopt_scaler() -> None:
    """Makes a scaler of PyTorch's that is scaling a loss right now one that agrees over ranks.

    Called while a step function is traced, from inside the multiplication that `GradScaler.scale` does.
    """
    frame: Any = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.amp.GradScaler):
            if not isinstance(owner, GradScaler):
                owner.__class__ = GradScaler
            return
        frame = frame.f_back
