"""Parameters that a step function trains although the wrapped model does not have them."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.torch.source_line import user_line

__all__ = ["point_out_foreign"]


def point_out_foreign(items: Sequence[Any], known: Collection[int]) -> None:
    """Warns of trained parameters that are not the model's.

    Args:
        items: leaves of the arguments of a call.
        known: ids of the model's parameters, and of what stands for them.
    """
    for item in items:
        if isinstance(item, nn.Parameter) and item.requires_grad and id(item) not in known:
            if not torch.is_grad_enabled():
                return
            warnings.warn(
                f"{user_line()}: a parameter of shape {tuple(item.shape)} is used here, and is not part of "
                "the wrapped model: its gradient comes to be on one rank alone. To train it, register it in "
                "the module that is wrapped (model.extra = parameter, before DistributedModel); else freeze "
                "it with requires_grad_(False).",
                stacklevel=2,
            )
