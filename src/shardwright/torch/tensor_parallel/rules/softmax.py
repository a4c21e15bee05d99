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
        kernel = _by_kernel(data, dim) if is_log and data.dtype == dtype else None
        if kernel is not None:
            result, own = kernel
            return result.add_(own - _over_ranks(group, own, torch.ones_like(own)))
        own, own_total = _maximum_and_total(_wide(data), dim)
        level = _over_ranks(group, own, own_total)
        result = torch.empty_like(data, dtype=dtype)
        for piece, block, sums in _in_blocks(dim, result, data, level):
            shifted = torch.sub(_wide(block), sums, out=_room(piece))
            shifted = shifted if is_log else shifted.exp_()
            if shifted is not piece:
                piece.copy_(shifted)
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
            if is_log:
                found = torch.exp(_wide(block), out=_room(piece)).mul_(sums)
                found = torch.sub(_wide(outer), found, out=found)
            else:
                found = torch.sub(_wide(outer), sums, out=_room(piece)).mul_(_wide(block))
            if found is not piece:
                piece.copy_(found)
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


def _over_ranks(group: TensorGroup, level: Tensor, total: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials over all ranks, of which each has ``total * exp(level)``."""
    most = group.reduce(level.clone(), "max")
    return group.reduce((level - most).exp_().mul_(total)).log_().add_(most)


def _by_kernel(data: Tensor, dim: int) -> tuple[Tensor, Tensor] | None:
    """The logarithm of the softmax of a rank's part by itself, and that of its sum of exponentials.

    PyTorch's kernel goes through memory once. None where it has no sum: nothing is there, or all is masked.
    """
    if not _is_here(data) or not data.numel() or data.dtype.itemsize < 4:
        return None
    most = data.amax(dim, keepdim=True)
    if not bool(most.isfinite().all()):
        return None
    result = torch.log_softmax(data, dim)
    # The greatest entry is there without a difference of large numbers.
    return result, most - result.amax(dim, keepdim=True)


def _is_here(data: Tensor) -> bool:
    """Whether a tensor has data that Python may look at without waiting."""
    return type(data) is Tensor and data.device.type == "cpu"


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
    if rows == 1 or not _is_here(first) or first.numel() <= _BLOCK:
        yield tensors
        return
    step = max(1, _BLOCK * rows // first.numel())
    for start in range(0, rows, step):
        yield tuple(each[start : start + step] for each in tensors)


def _room(piece: Tensor) -> Tensor:
    """Where a block of a result is computed: in its place, if that is wide enough."""
    wide = _wide_type(piece)
    return piece if piece.dtype == wide else torch.empty_like(piece, dtype=wide)


def _wide(data: Tensor) -> Tensor:
    """In 32 bits at least: kernels, too, add up 16 bits so."""
    return data.to(_wide_type(data))


def _wide_type(data: Tensor) -> torch.dtype:
    return torch.promote_types(data.dtype, torch.float32)
