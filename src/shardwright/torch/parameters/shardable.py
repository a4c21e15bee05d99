"""Selects the parameters that replicas shard."""

import torch
from torch import Tensor

__all__ = ["can_be_sharded"]


def can_be_sharded(parameter: Tensor, *, threshold: int) -> bool:
    """Whether a parameter is cut, or left whole on every rank."""
    return (
        parameter.dim() > 0
        and parameter.numel() >= max(threshold, 1)
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
    )
