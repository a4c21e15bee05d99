"""Calls an operator on this rank's parts by the shortest way.

`torch.ops.aten.mm.default(x, y)` takes its arguments apart by the operator's schema each time; `x.mm(y)` has
a parser that was compiled for it, and runs the same kernel.
"""

from collections.abc import Callable
from typing import Any

import torch

from shardwright.torch._private import packed_call

__all__ = ["METHODS", "direct_call"]

_SAME_ARGUMENTS = """
add.Tensor add_.Tensor addcdiv_.default addcmul_.default addmm.default bmm.default clone.default cos.default
detach.default div.Tensor div_.Tensor exp.default expand.default lerp_.Scalar masked_fill.Scalar mean.dim
mm.default mul.Tensor mul_.Tensor neg.default permute.default pow.Tensor_Scalar relu.default rsqrt.default
select.int sigmoid.default sin.default sqrt.default squeeze.dim sub.Tensor sub_.Tensor sum.dim_IntList
t.default tanh.default transpose.int unsqueeze.default view.default
""".split()


def _methods() -> dict[Any, Callable[..., Any]]:
    found = {}
    for each in _SAME_ARGUMENTS:
        name, overload = each.split(".")
        found[getattr(getattr(torch.ops.aten, name), overload)] = getattr(torch.Tensor, name)
    # Below autograd, where nobody asks whether a result is a view, these are the same.
    found[torch.ops.aten._unsafe_view.default] = torch.Tensor.view
    return found


METHODS = _methods()
"""Methods of tensors that take the arguments of an operator as they are, and call only that operator.

test_direct_call.py proves it of each.
"""


def direct_call(func: Any) -> Callable[..., Any]:
    """What runs an operator with the least work around it."""
    return METHODS.get(func) or packed_call(func)
