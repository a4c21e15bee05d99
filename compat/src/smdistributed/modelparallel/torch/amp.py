"""``smp.amp``: mixed precision."""

from typing import Any

import torch

from shardwright.torch.loss_scale import GradScaler as AgreeingScaler


class GradScaler(AgreeingScaler):
    """`torch.amp.GradScaler`, whose verdict is the same on all ranks.

    Args:
        enabled: False does nothing.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **kwargs: Any,
    ):
        device = kwargs.pop("device", "cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            **kwargs,
        )
