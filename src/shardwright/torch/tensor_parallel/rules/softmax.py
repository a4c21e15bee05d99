"""Softmax and its logarithm, over a whole dimension or over one that is cut."""

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
        data = _wide(data)
        shape = [1 if each == dim else size for each, size in enumerate(data.shape)]
        most = data.amax(dim, keepdim=True) if data.numel() else data.new_full(shape, -float("inf"))
        most = group.reduce(most, "max")
        shifted = data - most
        exponentials = shifted.exp()
        total = group.reduce(exponentials.sum(dim, keepdim=True))
        return (shifted - total.log() if is_log else exponentials / total).to(dtype)

    def backward(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        gradient, output, dtype = _wide(args[0]), _wide(args[1]), args[3]
        total = gradient if is_log else gradient * output
        total = group.reduce(total.sum(dim, keepdim=True))
        result = gradient - output.exp() * total if is_log else output * (gradient - total)
        return result.to(dtype)

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


def _wide(data: Tensor) -> Tensor:
    """In 32 bits at least: kernels, too, add up 16 bits so."""
    return data.to(torch.promote_types(data.dtype, torch.float32))
