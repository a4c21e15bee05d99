"""Operations on each element: any dimension may be cut, and many are linear."""

import torch

from shardwright.torch.tensor_parallel.call import Call, Input
from shardwright.torch.tensor_parallel.form import Form, broadcast
from shardwright.torch.tensor_parallel.rules.registry import rule

__all__ = ["elementwise"]

_LINEAR_IN_FIRST = frozenset(
    "neg positive clone zero native_dropout_backward threshold_backward gelu_backward silu_backward "
    "tanh_backward sigmoid_backward hardtanh_backward leaky_relu_backward elu_backward softplus_backward "
    "hardswish_backward hardsigmoid_backward mish_backward log_sigmoid_backward".split()
)


@rule(
    "clone",
    "_to_copy",
    "lift_fresh",
    "masked_fill",
    "where",
    "copy",
    "fill",
    "zero",
    "lerp",
    "native_dropout_backward",
    "_prelu_kernel",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "rrelu_with_noise_backward",
)
def elementwise(call: Call) -> Form | None:
    """Every operand is stretched to the shape of the result."""
    shapes = [tuple(meta.shape) for meta in call.outputs if meta is not None]
    if not shapes or any(shape != shapes[0] for shape in shapes):
        return None
    shape = shapes[0]
    if any(one.ndim > len(shape) for one in call.inputs):
        return None
    names = tuple(range(len(shape)))
    return Form(
        inputs=tuple(broadcast(one.shape, shape) for one in call.inputs),
        outputs=(names,) * len(call.outputs),
        terms=_terms(call),
    )


def _terms(call: Call) -> tuple[tuple[int, ...], ...]:
    """What the result is linear in."""
    result = call.outputs[0]
    if result is None or result.dtype == torch.bool:
        return ()
    name = call.name[:-1] if call.name.endswith("_") else call.name
    first, other = call.get("self"), call.get("other")
    if name in _LINEAR_IN_FIRST:
        return ((0,),)
    match name:
        case "add" | "sub" | "rsub" if isinstance(first, Input) and isinstance(other, Input):
            return ((0,), (1,))
        case "mul":
            return ((0, 1),) if isinstance(other, Input) else ((0,),)
        case "div" if call.get("rounding_mode") is None:
            return ((0,),)
        case "where" if isinstance(first, Input) and (isinstance(other, Input) or other == 0):
            return ((1,), (2,)) if isinstance(other, Input) else ((1,),)
        case "masked_fill":
            return ((0,), (2,)) if isinstance(call["value"], Input) else ((0,),) if call["value"] == 0 else ()
        case "fill" if not isinstance(call["value"], Input) and call["value"] == 0:
            return ((0,),)
        case "addcmul":
            return ((0,), (1, 2))
        case "addcdiv":
            return ((0,), (1,))
        case "lerp":
            return ((0,), (1,))
        case "copy" if _keeps_all_digits(call.inputs[1].dtype, result.dtype):
            return ((0,), (1,))
        case "_to_copy" if _keeps_all_digits(call.inputs[0].dtype, result.dtype):
            return ((0,),)
    return ()


def _keeps_all_digits(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether rounding first and adding then is as exact: summands rounded to 16 bits are not."""
    return torch.promote_types(source, target) == target and target != torch.bool
