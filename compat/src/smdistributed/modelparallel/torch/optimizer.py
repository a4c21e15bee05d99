"""The wrapped optimizer: ``smp.DistributedOptimizer``."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

import shardwright.torch as sw
from smdistributed.modelparallel.torch.state_mod import current_run

__all__ = ["DistributedOptimizer"]

_FIRST_DYNAMIC_SCALE = 2.0**32


class DistributedOptimizer(sw.DistributedOptimizer):
    """Wraps an optimizer, made before or after the model was wrapped.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        static_loss_scale: with ``fp16``, a scale that does not change.
        dynamic_loss_scale: with ``fp16``, whether the scale changes.
        dynamic_loss_args: how: ``init_scale`` (2**32), ``scale_factor`` (2), ``scale_window`` (1000),
            ``min_scale`` (1), ``delayed_shift`` (1), ``consecutive_hysteresis`` (False).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ):
        current_run()
        arguments = {"init_scale": _FIRST_DYNAMIC_SCALE, **(dynamic_loss_args or {})}
        super().__init__(
            optimizer,
            static_loss_scale=static_loss_scale,
            dynamic_loss_scale=bool(dynamic_loss_scale),
            dynamic_loss_args=arguments if dynamic_loss_scale else None,
        )
