"""A gradient scaler that makes the same decision on all ranks.

`torch.amp.GradScaler` looks for infinities in the gradients of its own rank. The stages of a pipeline hold
different gradients, and so do ranks that shard parameters: they would disagree on whether to step. This
scaler has them agree before any rank steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.run.context import context, is_initialized

__all__ = [
    "GradScaler",
    "losses_were_scaled",
    "scale_of_losses",
    "scalers_agree",
    "scaling_begins",
    "scaling_noted",
]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` under the name that scripts of other libraries look for.

    While a model is spread over stages, PyTorch's own and classes made from it agree over ranks, too.
    """


@contextmanager
def scalers_agree() -> Iterator[None]:
    """Has all scalers of this process agree with those of the other ranks of the replica."""
    original = torch.amp.GradScaler._unscale_grads_

    def unscale(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = original(self, *args, **kwargs)
        if not is_initialized():
            return found
        current = context()
        all_groups = (current.groups.shard, current.groups.pipeline, current.groups.tensor)
        groups = [group for group in all_groups if group is not None]
        if not groups:
            return found
        # A rank without parameters has nothing to look at, but takes part in the verdict.
        verdicts = found or {current.device: torch.zeros((), dtype=torch.float32, device=current.device)}
        for verdict in verdicts.values():
            for group in groups:
                dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
        return verdicts

    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler._unscale_grads_ = original  # type: ignore[method-assign]


class _Scaling:
    scaler: torch.amp.GradScaler | None = None


def scaling_begins() -> None:
    """A step begins, in which no loss was scaled yet."""
    _Scaling.scaler = None


def losses_were_scaled() -> bool:
    """Whether a scaler has scaled a loss since: then it leaves out by itself what overflows."""
    return _Scaling.scaler is not None


def scale_of_losses() -> float:
    """The factor of the scaler that has scaled losses since; 1 without one."""
    return 1.0 if _Scaling.scaler is None else float(_Scaling.scaler.get_scale())


@contextmanager
def scaling_noted() -> Iterator[None]:
    """Has all scalers of this process note that they scale a loss."""
    original = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            _Scaling.scaler = self
        return original(self, outputs)

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = original  # type: ignore[method-assign]
