"""Operations on lists of tensors, as optimizers use them: each place of the lists by itself."""

from typing import Any

import torch
from torch import Tensor

from shardwright.placement import WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call, Input
from shardwright.torch.tensor_parallel.form import Candidate
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__ = ["lists"]

# Their results are not of their inputs' shapes, or depend on all elements of one.
_NOT_ELEMENTWISE = ("_foreach_max", "_foreach_powsum")


@rule("_foreach_norm")
def norms(call: Call) -> list[Candidate] | None:
    """The ranks add up powers of the norms of their parts, all in one sum."""
    order = float(call["ord"])
    if order <= 0 or call.get("dtype") is not None:
        return None
    inputs = tuple(WHOLE if one.pending else one.placement for one in call.inputs)
    is_cut = [isinstance(each, Cut) for each in inputs]
    if not any(is_cut):
        return None

    def over_ranks(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> list[Tensor]:
        found: list[Tensor] = list(func(*args, **kwargs))
        parts = torch.stack([each for each, cut in zip(found, is_cut, strict=True) if cut])
        if order == float("inf"):
            total = group.reduce(parts, "max")
        else:
            total = group.reduce(parts**order) ** (1 / order)
        upcoming = iter(total.unbind())
        return [next(upcoming) if cut else each for each, cut in zip(found, is_cut, strict=True)]

    if len({one.dtype for one in call.inputs}) > 1:
        return None
    return [Candidate(inputs, (WHOLE,) * len(inputs), compute=over_ranks, share=1 / call.num_ranks)]


def lists(call: Call) -> list[Candidate] | None:
    """The tensors at one place of all lists are cut alike; those of other shapes are whole."""
    if call.name in _NOT_ELEMENTWISE:
        return None
    columns = [value for value in call.arguments.values() if _is_list(value)]
    if not columns:
        return None
    placements: list[Placement] = [WHOLE] * len(call.inputs)
    chosen: list[Placement] = []
    for place, first in enumerate(columns[0]):
        row = [column[place] for column in columns if place < len(column)]
        alike = [one for one in row if one.shape == first.shape]
        written = [one for one in alike if one.index in call.written and one.cut is not None]
        cuts = [one.cut for one in (*written, *alike) if one.cut is not None]
        own: Cut | None = cuts[0] if cuts else None
        for one in alike:
            placements[one.index] = own or WHOLE
        chosen.append(own or WHOLE)
    outputs = [
        WHOLE if meta is None else chosen[index % len(chosen)] for index, meta in enumerate(call.outputs)
    ]
    return [Candidate(tuple(placements), tuple(outputs), share=1 / call.num_ranks)]


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Input) for each in value)
