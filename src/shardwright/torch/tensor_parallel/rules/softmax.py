"""Softmax and its logarithm, over a whole dimension or over one that is cut."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.torch.tensor_parallel.call import Call
from shardwright.torch.tensor_parallel.form import Candidate, Form, candidates_of
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__: list[str] = []


@rule("_safe_softmax")
def safe_softmax(call: Call) -> Form:
    """Other dimensions may be cut. Rows that are masked entirely give zeros."""
    names = tuple(range(call.inputs[0].ndim))
    return Form((names,), (names,), uncut=frozenset([call.dim()]))


@rule("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
def softmax(call: Call) -> list[Candidate]:
    """Other dimensions may be cut, or that of the softmax: then ranks share its maximum and its sum."""
    ndim = call.inputs[0].ndim
    names = tuple(range(ndim))
    dim = call.dim()
    is_backward = call.name.endswith("_backward_data")
    form = Form(
        (names,) * len(call.inputs),
        (names,),
        uncut=frozenset([dim]),
        terms=((0,),) if is_backward else (),
    )
    found = candidates_of(call, form)
    cuts = [one.cut for one in call.inputs if one.cut is not None and one.cut.dim == dim]
    is_log = "log" in call.name

    def forward(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        data, _, to_float = args
        dtype = torch.float32 if to_float else data.dtype
        own, own_total = _maximum_and_total(_wide(data), dim)
        most = group.reduce(own.clone(), "max")
        total = group.reduce(own_total.mul_((own - most).exp_()))
        result = torch.empty_like(data, dtype=dtype)
        for piece, block, greatest, sums in _in_blocks(dim, result, data, most, total):
            shifted = _wide(block) - greatest
            piece.copy_(shifted.sub_(sums.log()) if is_log else shifted.exp_().div_(sums))
        return result

    def backward(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        gradient, output, dtype = args[0], args[1], args[3]
        if is_log:
            total = gradient.sum(dim, keepdim=True, dtype=_wide_type(gradient))
        else:
            total = (_wide(gradient) * _wide(output)).sum(dim, keepdim=True)
        total = group.reduce(total)
        result = torch.empty_like(output, dtype=dtype)
        for piece, outer, block, sums in _in_blocks(dim, result, gradient, output, total):
            wide = _wide(outer)
            if is_log:
                piece.copy_(torch.addcmul(wide, _wide(block).exp(), sums, value=-1))
            else:
                piece.copy_((wide - sums).mul_(_wide(block)))
        return result

    for cut in cuts:
        found.append(
            Candidate(
                (cut,) * len(call.inputs),
                (cut,),
                compute=backward if is_backward else forward,
                share=1 / call.num_ranks,
            )
        )
    return found


def _maximum_and_total(data: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Of a rank's part: its maximum, and the sum of the exponentials of what lies below it."""
    shape = [1 if each == dim else size for each, size in enumerate(data.shape)]
    least = torch.finfo(data.dtype).min
    most, total = data.new_full(shape, least), data.new_zeros(shape)
    if data.numel():
        for block, greatest, sums in _in_blocks(dim, data, most, total):
            # Where all is masked: what lies below minus infinity is no number.
            torch.clamp(block.amax(dim, keepdim=True), min=least, out=greatest)
            torch.sum((block - greatest).exp_(), dim, keepdim=True, out=sums)
    return most, total


_BLOCK = 2**16
"""Elements that stay in a cache from one operation to the next."""


def _in_blocks(dim: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors that are alike but for a dimension, in blocks of their first one.

    A softmax is a row of small operations here, each of which would go through memory.
    """
    first = tensors[0]
    rows = first.shape[0] if first.dim() > 1 and dim != 0 else 1
    has_data = type(first) is Tensor and first.device.type == "cpu"
    if rows == 1 or not has_data or first.numel() <= _BLOCK:
        yield tensors
        return
    step = max(1, _BLOCK * rows // first.numel())
    for start in range(0, rows, step):
        yield tuple(each[start : start + step] for each in tensors)


def _wide(data: Tensor) -> Tensor:
    """In 32 bits at least: kernels, too, add up 16 bits so."""
    return data.to(_wide_type(data))


def _wide_type(data: Tensor) -> torch.dtype:
    return torch.promote_types(data.dtype, torch.float32)
