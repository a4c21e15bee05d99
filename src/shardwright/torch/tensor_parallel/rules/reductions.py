"""Matrix products, norms, sums, means, extrema: what is summed over is cut, or whole."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut
from shardwright.torch.tensor_parallel.call import (
    Call,
    Candidate,
    Form,
    Input,
    Letters,
    broadcast,
    candidates_of,
    letters,
    rule,
)
from shardwright.torch.tensor_parallel.group import TensorGroup

_PRODUCTS = {
    "mm": "mk,kn->mn",
    "bmm": "bmk,bkn->bmn",
    "mv": "mk,k->m",
    "dot": "k,k->",
    "vdot": "k,k->",
    "addmm": "mk,kn->mn",
    "addmv": "mk,k->m",
    "baddbmm": "bmk,bkn->bmn",
    "ger": "m,n->mn",
    "outer": "m,n->mn",
    "addr": "m,n->mn",
}


@rule(*_PRODUCTS)
def products(call: Call) -> Form:
    """A product, with something added if there is a third tensor."""
    name = call.name[:-1] if call.name.endswith("_") else call.name
    (left, right), (result,) = letters(_PRODUCTS[name])
    inputs: tuple[Letters, ...] = (left, right)
    terms: tuple[tuple[int, ...], ...] = ((0, 1),)
    sizes = dict(zip(left + right, call.inputs[-2].shape + call.inputs[-1].shape, strict=True))
    if len(call.inputs) == 3:
        shape = tuple(sizes[letter] for letter in result)
        inputs, terms = (broadcast(call.inputs[0].shape, shape, result), left, right), ((0,), (1, 2))
    flops = 2.0
    for size in sizes.values():
        flops *= size
    return Form(inputs, (result,), sums=(frozenset(left) - frozenset(result),), terms=terms, flops=flops)


@rule("_grouped_mm")
def grouped_product(call: Call) -> list[Candidate] | None:
    """Products of several matrices at once, of experts: rows, columns, or the dimension between, in groups.

    Offsets say where the groups begin. ``g`` counts groups; a grouped dimension stays whole.
    """
    left, right = call.inputs[:2]
    if call.get("bias") is not None:
        return None
    text, grouped = {
        (2, 3): ("mk,gkn->mn", "mg"),
        (3, 2): ("gmk,kn->mn", "ng"),
        (2, 2): ("mk,kn->gmn", "kg"),
        (3, 3): ("gmk,gkn->gmn", ""),
    }[left.ndim, right.ndim]
    inputs, outputs = letters(text)
    offsets: tuple[Letters, ...] = () if call.get("offs") is None else ((None,),)
    flops = 2.0 * left.numel * right.shape[-1]
    form = Form(
        inputs + offsets,
        outputs,
        uncut=frozenset(grouped),
        sums=(frozenset("k") - frozenset(grouped),),
        terms=((0, 1),),
        flops=flops,
    )
    call.flops = flops
    return [each for each in candidates_of(call, form) if _is_aligned(call, each)]


def _is_aligned(call: Call, candidate: Candidate) -> bool:
    """Whether each rank's rows begin at a multiple of 16 bytes, as the kernel demands."""
    for one, placement in zip(call.inputs[:2], candidate.inputs, strict=False):
        if isinstance(placement, Cut):
            lengths = {placement.length(rank) for rank in range(call.num_ranks)}
            if any(length * one.dtype.itemsize % 16 for length in lengths) or 0 in lengths:
                return False
    return True


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> Form:
    """Rows may be cut."""
    data = call.inputs[0]
    num_rows = data.ndim - len(call["normalized_shape"])
    names = tuple(range(data.ndim))
    rows = names[:num_rows]
    statistics = (*rows, *(None for _ in names[num_rows:]))
    inputs = (names, *(names[num_rows:] for _ in call.inputs[1:]))
    outputs = (names, *(statistics for _ in call.outputs[1:]))
    return Form(inputs, outputs, uncut=frozenset(names[num_rows:]))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def gradient_of_layer_norm(call: Call) -> Form:
    """Gradients of weight and bias are sums over the rows."""
    data = call["input"]
    num_rows = data.ndim - len(call["normalized_shape"])
    names = tuple(range(data.ndim))
    rows, normalised = names[:num_rows], names[num_rows:]
    statistics = (*rows, *(None for _ in normalised))
    inputs = []
    for name, one in call.arguments.items():
        if isinstance(one, Input):
            of_statistics = name in ("mean", "rstd")
            inputs.append(
                normalised if name in ("weight", "bias") else statistics if of_statistics else names
            )
    return Form(
        tuple(inputs),
        (names, *(normalised for _ in call.outputs[1:])),
        uncut=frozenset(normalised),
        sums=(frozenset(), *(frozenset(rows) for _ in call.outputs[1:])),
        terms=((0,),),
    )


def reduced_dims(call: Call, name: str = "dim") -> list[int]:
    ndim, dims = call.inputs[0].ndim, call.get(name)
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(ndim))
    return [dim % ndim if ndim else 0 for dim in (dims if isinstance(dims, list | tuple) else [dims])]


def _letters(call: Call, dims: Sequence[int]) -> tuple[Letters, Letters]:
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
