"""Finds parameters that a step function must not use or return."""

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.tracing.traced_values import TracedValues

__all__ = ["point_out_foreign", "point_out_foreign_behind", "refuse_returned"]


def point_out_foreign(
    items: Sequence[Any], known: Collection[int], was_there: Callable[[Tensor], bool]
) -> None:
    """Warns of trained parameters that are not the model's, be they `nn.Parameter` or plain tensors.

    Args:
        items: leaves of the arguments of a call.
        known: ids of the model's parameters, and of what stands for them.
        was_there: tells whether a plain tensor was there before the step function was called.
    """
    for item in items:
        if not isinstance(item, Tensor) or not item.requires_grad or id(item) in known:
            continue
        is_plain = type(item) is Tensor and item.is_leaf and was_there(item)
        if torch.is_grad_enabled() and (is_plain or isinstance(item, nn.Parameter)):
            kind = "trained tensor" if is_plain else "parameter"
            warnings.warn(
                f"{user_line()}: a {kind} of shape {tuple(item.shape)} is used here, and is not part of "
                "the wrapped model: its gradient comes to be on one rank alone. To train it, register it in "
                "the module that is wrapped (model.extra = nn.Parameter(tensor), before DistributedModel); "
                "else freeze it with requires_grad_(False).",
                stacklevel=2,
            )


def point_out_foreign_behind(loss: Tensor, parameters: Iterable[Tensor]) -> None:
    """Warns of trained parameters behind a loss that are not the model's, where there are replicas.

    Args:
        loss: of a microbatch.
        parameters: of the whole model, and what computes in their place.
    """
    known = {id(parameter) for parameter in parameters}
    pending = [loss.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, nn.Parameter) and id(parameter) not in known:
            warnings.warn(
                f"the loss has a gradient for a parameter of shape {tuple(parameter.shape)} that is not part "
                "of the wrapped model: each replica trains it by its own batches, so that replicas drift "
                "apart. Register it in the module that is wrapped (model.loss = loss_module, before "
                "DistributedModel), which averages its gradient; else freeze it with requires_grad_(False).",
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
