"""Sums, means, extrema and norms over dimensions, and operations along one dimension."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut
from shardwright.torch.tensor_parallel.call import Call
from shardwright.torch.tensor_parallel.form import Candidate, Form, Letters, candidates_of
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__ = ["reduced_dims"]


def reduced_dims(call: Call, name: str = "dim") -> list[int]:
    """The dimensions that a reduction is over."""
    ndim, dims = call.inputs[0].ndim, call.get(name)
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(ndim))
    return [dim % ndim if ndim else 0 for dim in (dims if isinstance(dims, list | tuple) else [dims])]


def _letters(call: Call, dims: Sequence[int]) -> tuple[Letters, Letters]:
    """Those of the tensor and of its reduction."""
    names = tuple(range(call.inputs[0].ndim))
    if call.get("keepdim"):
        return names, tuple(None if dim in dims else dim for dim in names)
    return names, tuple(dim for dim in names if dim not in dims)


@rule("sum", "mean", "nansum")
def sums(call: Call) -> list[Candidate] | None:
    """A rank's summands give a summand of the whole sum."""
    dims = reduced_dims(call)
    names, left = _letters(call, dims)
    terms = () if call.name == "nansum" else ((0,),)
    form = Form((names,), (left,), sums=(frozenset(dims),), terms=terms)
    found = candidates_of(call, form)
    if call.name == "mean":
        count = 1
        for dim in dims:
            count *= call.inputs[0].shape[dim]
        keep, dtype = bool(call.get("keepdim")), call.get("dtype")

        def part_of_mean(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
            return torch.sum(args[0], dims, keep, dtype=dtype) / count

        found = [
            replace(each, compute=part_of_mean)
            if isinstance(each.inputs[0], Cut) and each.outputs[0] == PARTIAL_SUM
            else each
            for each in found
        ]
    return found


@rule("amax", "amin", "any", "all", "linalg_vector_norm")
def extrema(call: Call) -> list[Candidate]:
    """A cut dimension is reduced on each rank, then over the ranks."""
    dims = reduced_dims(call)
    names, left = _letters(call, dims)
    found = candidates_of(call, Form((names,), (left,), uncut=frozenset(dims)))
    one = call.inputs[0]
    if one.cut is None or one.cut.dim not in dims:
        return found
    if call.name == "linalg_vector_norm" and not call["ord"] > 0:
        return found
    keep = bool(call.get("keepdim"))

    def over_ranks(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        data: Tensor = args[0]
        shape = [1 if dim in dims else size for dim, size in enumerate(data.shape)]
        if call.name == "linalg_vector_norm":
            args[0] = data if data.numel() else data.new_zeros(shape)
            order, own = call["ord"], func(*args, **kwargs)
            if order == float("inf"):
                return group.reduce(own, "max")
            total: Tensor = group.reduce(own**order) ** (1 / order)
            return total
        if call.name in ("any", "all"):
            own = func(*args, **kwargs).to(torch.uint8)
            return group.reduce(own, "max" if call.name == "any" else "min").bool()
        most = call.name == "amax"
        if data.numel():
            own = func(*args, **kwargs)
        else:
            own = data.new_full(shape, _least(data.dtype) if most else _greatest(data.dtype))
            own = own if keep else own.squeeze(tuple(dims))
        return group.reduce(own.clone(), "max" if most else "min")

    return [*found, Candidate((one.cut,), (WHOLE,), compute=over_ranks, share=1 / call.num_ranks)]


def _least(dtype: torch.dtype) -> float:
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _greatest(dtype: torch.dtype) -> float:
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


@rule(
    "max",
    "min",
    "prod",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "argmax",
    "argmin",
    "logsumexp",
    "norm",
    "median",
)
def other_reductions(call: Call) -> Form | None:
    """Other dimensions may be cut."""
    if len(call.inputs) != 1 or (call.name == "norm" and call.get("p") is None):
        return None
    dims = reduced_dims(call)
    names, left = _letters(call, dims)
    return Form((names,), (left,) * len(call.outputs), uncut=frozenset(dims))


@rule("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "topk", "kthvalue", "mode")
def along_one_dimension(call: Call) -> Form | None:
    """Other dimensions may be cut; running sums are linear."""
    if len(call.inputs) != 1 or call.inputs[0].ndim == 0:
        return None
    names: Letters = tuple(range(call.inputs[0].ndim))
    dim = call.dim()
    left: Letters = tuple(None if each == dim else each for each in names)
    if call.name in ("kthvalue", "mode") and not call.get("keepdim"):
        left = tuple(each for each in left if each is not None)
    terms = ((0,),) if call.name == "cumsum" and call.inputs[0].dtype == call.outputs[0].dtype else ()  # type: ignore[union-attr]
    return Form((names,), (left,) * len(call.outputs), uncut=frozenset([dim]), terms=terms)
