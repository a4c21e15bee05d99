"""Parameters that a step function uses or returns although it cannot."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.errors import UsageError
from shardwright.torch.source_line import user_line
from shardwright.torch.traced_values import TracedValues

__all__ = ["point_out_foreign", "refuse_returned"]


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


def refuse_returned(results: Iterable[Any], values: TracedValues) -> None:
    """Refuses parameters and buffers among the leaves of what a traced step function returns.

    Raises:
        UsageError: there is one; its name is given.
    """
    for item in results:
        if id(item) in values.lent_for:
            name = values.names[id(item)]
            raise UsageError(
                f"the step function returns the parameter or buffer {name} itself, which other ranks do "
                f"not have. Return what it holds: {name.rpartition('.')[2]}.detach().clone()."
            )
