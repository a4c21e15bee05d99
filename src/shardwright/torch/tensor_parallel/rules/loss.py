"""Losses over classes: the classes are cut (a vocabulary), or the rows."""

from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call
from shardwright.torch.tensor_parallel.form import Candidate, Form, broadcast, candidates_of
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.rules.embedding import own_rows
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__: list[str] = []

_NONE, _MEAN, _SUM = 0, 1, 2


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call) -> list[Candidate] | None:
    """The logarithm of the target's probability is on the rank that has the target's class."""
    scores, target = call.inputs[:2]
    classes = 1 if scores.ndim > 1 else 0
    cut = scores.cut
    if cut is None or (cut.dim != classes and cut.dim != 0):
        return None
    reduction, ignored = call["reduction"], call["ignore_index"]
    is_row = cut.dim != classes
    ndim = target.ndim

    def forward(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> tuple[Tensor, Tensor]:
        data, wanted, weight = args[:3]
        counts = wanted != ignored
        weights = None if weight is None else _weights(weight, wanted, counts)
        if is_row:
            picked = counts
            rows = torch.where(counts, wanted, 0)
        else:
            rows, is_own = own_rows(wanted, cut, group.rank)
            picked = counts & is_own
        if data.shape[classes]:
            losses = -data.gather(classes, rows.unsqueeze(classes)).squeeze(classes)
            losses = torch.where(picked, losses, torch.zeros((), dtype=data.dtype, device=data.device))
            losses = losses if weights is None else losses * weights
        else:
            losses = data.new_zeros(rows.shape)
        if reduction == _NONE:
            return losses, data.new_zeros(())
        total = counts.sum().to(data.dtype) if weights is None else weights.sum()
        if is_row:
            total = group.reduce(total)
        loss = losses.sum()
        return (loss / total if reduction == _MEAN else loss), total

    of_target: Placement = cut if is_row else WHOLE
    inputs: tuple[Placement, ...] = (cut, of_target, *(WHOLE for _ in call.inputs[2:]))
    if reduction == _NONE:
        outputs: tuple[Placement, ...] = (cut.at(0) if is_row else PARTIAL_SUM, WHOLE)
        if ndim == 0:
            outputs = (PARTIAL_SUM, WHOLE)
    else:
        outputs = (PARTIAL_SUM, WHOLE)
    return [Candidate(inputs, outputs, compute=forward, share=1 / call.num_ranks)]


@rule("nll_loss_backward", "nll_loss2d_backward")
def gradient_of_nll_loss(call: Call) -> list[Candidate] | None:
    """Each rank writes the gradient of its own classes, or rows."""
    gradient, scores = call.inputs[:2]
    classes = 1 if scores.ndim > 1 else 0
    cut = scores.cut
    if cut is None or (cut.dim != classes and cut.dim != 0):
        return None
    reduction, ignored = call["reduction"], call["ignore_index"]
    is_row = cut.dim != classes

    def backward(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        outer, data, wanted, weight = args[:4]
        total = args[-1]
        rows, picked = (torch.where(wanted != ignored, wanted, 0), wanted != ignored)
        if not is_row:
            rows, is_own = own_rows(wanted, cut, group.rank)
            picked = picked & is_own
        result = torch.zeros_like(data)
        if not data.shape[classes]:
            return result
        values = -outer / total if reduction == _MEAN else -outer
        if weight is not None:
            values = values * _weights(weight, wanted, wanted != ignored)
        values = torch.where(picked, values.expand(rows.shape), torch.zeros_like(values))
        return result.scatter_(classes, rows.unsqueeze(classes), values.unsqueeze(classes))

    of_gradient: Placement = cut.at(0) if is_row and gradient.ndim else WHOLE
    of_target = cut.at(0) if is_row else WHOLE
    inputs: tuple[Placement, ...] = (of_gradient, cut, of_target, *(WHOLE for _ in call.inputs[3:]))
    return [Candidate(inputs, (cut,), compute=backward, share=1 / call.num_ranks)]


def _weights(weight: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """The weight of each target's class; 0 of those that are ignored."""
    return weight[torch.where(counts, wanted, 0)] * counts


_ELEMENTWISE = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)


@rule(*_ELEMENTWISE)
def elementwise_loss(call: Call) -> Form | list[Candidate] | None:
    """A loss of each element, and perhaps their sum or mean."""
    shape = call.inputs[0].shape
    if any(one.ndim > len(shape) for one in call.inputs) or call.inputs[1].shape != shape:
        return None
    names = tuple(range(len(shape)))
    inputs = tuple(broadcast(one.shape, shape) for one in call.inputs)
    reduction = call["reduction"]
    if reduction == _NONE:
        return Form(inputs, (names,))
    found = candidates_of(call, Form(inputs, ((),), sums=(frozenset(names),)))
    if reduction == _SUM:
        return found
    count = call.inputs[0].numel

    place = [argument.name for argument in call.func._schema.arguments].index("reduction")

    def part_of_mean(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        # The mean is the default, so it may not be among the arguments.
        given = [*args[:place], *[None] * (place - len(args)), _SUM, *args[place + 1 :]]
        return func(*given, **kwargs) / count  # type: ignore[no-any-return]

    return [
        Candidate(each.inputs, each.outputs, compute=part_of_mean, share=each.share)
        if any(isinstance(placement, Cut) for placement in each.inputs)
        else each
        for each in found
    ]
