"""Operations on each element, on lists of tensors, random numbers, new tensors like another.

So a dropout mask does not depend on the number of ranks, and the ranks' generators stay alike.
"""

from typing import Any

import torch
from torch import Tensor

from shardwright.placement import WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call, Candidate, Form, Input, broadcast, rule
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import own_part
from shardwright.torch.tensor_parallel.spec import dense_strides

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
    if target.is_floating_point and target.itemsize == 1:  # 8 bits, which PyTorch promotes to nothing
        return False
    return torch.promote_types(source, target) == target and target != torch.bool


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def like(call: Call) -> list[Candidate] | None:
    """Cut like the other tensor."""
    if len(call.inputs) != 1:
        return None
    placement = call.inputs[0].placement
    result = placement if isinstance(placement, Cut) else WHOLE
    return [Candidate((placement,), (result,), share=1 / call.num_ranks)]


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new(call: Call) -> list[Candidate] | None:
    """Cut like the other tensor if it has the same shape."""
    if len(call.inputs) != 1:
        return None
    one = call.inputs[0]
    if one.cut is None or tuple(call["size"]) != one.shape:
        return [Candidate((one.placement,), (WHOLE,), share=0)]
    cut = one.cut

    def arguments(rank: int) -> dict[str, Any]:
        size = list(one.shape)
        size[cut.dim] = cut.length(rank)
        if call.name != "new_empty_strided":
            return {"size": size}
        return {"size": size, "stride": dense_strides(size, call["stride"])}

    return [Candidate((cut,), (cut,), arguments=arguments, share=0)]


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


_FILLS = "bernoulli_ normal_ uniform_ exponential_ random_ geometric_ log_normal_ cauchy_".split()
_LIKE = "rand_like randn_like randint_like".split()


def draws_all(call: Call) -> list[Candidate] | None:
    """Other operations that draw run whole."""
    del call
    return None


@rule(*_FILLS, *_LIKE)
def fill(call: Call) -> list[Candidate] | None:
    """Fills a tensor whose values do not count."""
    one = call.inputs[0]
    if len(call.inputs) != 1 or one.cut is None or call.name == "bernoulli":
        return None
    cut = one.cut

    def draw(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        part: Tensor = args[0]
        shape = [*one.shape]
        # Draws go by the order in memory: the part has that of the whole.
        everything = part.new_empty_strided(shape, dense_strides(shape, one.strides))
        drawn = func(everything, *args[1:], **kwargs)
        own = own_part(drawn, cut, group.rank)
        return part.copy_(own) if call.written else own.clone()

    return [Candidate((cut,), (cut,), compute=draw)]


@rule("native_dropout")
def dropout(call: Call) -> list[Candidate] | None:
    """The mask of the whole tensor, and each rank's part of it."""
    one = call.inputs[0]
    if one.cut is None or not call["train"]:
        return None
    cut = one.cut

    def draw(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> tuple[Tensor, Tensor]:
        part: Tensor = args[0]
        shape = [*one.shape]
        ones = part.new_empty_strided(shape, dense_strides(shape, one.strides)).fill_(1)
        scaled, mask = func(ones, *args[1:], **kwargs)
        return part * own_part(scaled, cut, group.rank), own_part(mask, cut, group.rank).clone()

    return [Candidate((cut,), (cut, cut), compute=draw)]
