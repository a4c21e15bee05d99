"""Operations with random arguments, each with the family of rules that it belongs to.

A case is a function of a `Draw`, which makes sizes and tensors; it returns the operator and its arguments.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, Placement

__all__ = ["CASES", "Draw", "parts_of"]

aten = torch.ops.aten


class Draw:
    """Random sizes and tensors, the same for the same seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def size(self, least: int = 1, most: int = 5) -> int:
        return self.random.randint(least, most)

    def sizes(self, ndim: int, least: int = 1, most: int = 4) -> list[int]:
        return [self.size(least, most) for _ in range(ndim)]

    def flag(self) -> bool:
        return self.random.random() < 0.5

    def dim(self, ndim: int) -> int:
        return self.random.randrange(-ndim, ndim)

    def tensor(self, *shape: int) -> Tensor:
        """In some order of dimensions in memory."""
        order = list(range(len(shape)))
        if self.random.random() < 0.3:
            self.random.shuffle(order)
        dense = torch.randn([shape[dim] for dim in order], dtype=torch.float64, generator=self.generator)
        return dense.permute([order.index(dim) for dim in range(len(shape))])

    def dense(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def stretched(self, shape: list[int]) -> Tensor:
        """A tensor that can be stretched to a shape."""
        own = [1 if self.random.random() < 0.25 else size for size in shape]
        return self.tensor(*own[self.random.randint(0, len(own)) :] if self.flag() else own)

    def index(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return torch.randint(0, 2, shape, generator=self.generator).bool()

    def placement(self, tensor: Tensor, num_ranks: int) -> Placement:
        """Whole, pending, or cut along some dimension: evenly, in segments, or at random."""
        kind = self.random.random()
        if tensor.dim() == 0:
            return PARTIAL_SUM if kind < 0.3 and tensor.is_floating_point() else WHOLE
        if kind < 0.25:
            return WHOLE
        if kind < 0.45 and tensor.dtype != torch.bool:
            return PARTIAL_SUM
        dim = self.random.randrange(tensor.dim())
        size = tensor.shape[dim]
        if kind < 0.75:
            return Cut.even(dim, size, num_ranks=num_ranks)
        bounds = sorted(self.random.randint(0, size) for _ in range(self.random.randint(1, 4)))
        runs = zip([0, *bounds], [*bounds, size], strict=True)
        return Cut.of(dim, [(self.random.randrange(num_ranks), b - a) for a, b in runs])

    def placements(self, tensors: list[Tensor], num_ranks: int) -> list[Placement]:
        """Of several tensors; often alike, as a model's are."""
        found = [self.placement(tensor, num_ranks) for tensor in tensors]
        if self.flag():
            chosen = next((each for each in found if isinstance(each, Cut)), None)
            for index, tensor in enumerate(tensors):
                if (
                    chosen is not None
                    and tensor.dim() > chosen.dim
                    and tensor.shape[chosen.dim] == chosen.size
                ):
                    found[index] = chosen
        return found


def parts_of(tensor: Tensor, placement: Placement, num_ranks: int, draw: Draw) -> list[Tensor]:
    """What each rank has of a tensor."""
    if placement == PARTIAL_SUM:
        # Of few binary digits, so that the sum is exact.
        step = 4 if tensor.is_floating_point() or tensor.is_complex() else 1
        summands = [
            torch.randint(-9, 9, tensor.shape, generator=draw.generator).to(tensor.dtype).div_(step)
            if step > 1
            else torch.randint(-9, 9, tensor.shape, generator=draw.generator).to(tensor.dtype)
            for _ in range(num_ranks - 1)
        ]
        last = tensor.clone()
        for each in summands:
            last -= each
        return [torch.empty_like(tensor).copy_(each) for each in (*summands, last)]
    if isinstance(placement, Cut):
        found = []
        for rank in range(num_ranks):
            pieces = [tensor.narrow(placement.dim, a, b - a) for a, b in placement.intervals(rank)]
            piece = torch.cat(pieces, placement.dim) if pieces else tensor.narrow(placement.dim, 0, 0)
            found.append(_like(piece, tensor))
        return found
    return [_like(tensor, tensor) for _ in range(num_ranks)]


def _like(piece: Tensor, tensor: Tensor) -> Tensor:
    """A copy in the tensor's order of memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    dense = piece.permute(order).contiguous().clone()
    return dense.permute([order.index(dim) for dim in range(tensor.dim())])


Made = tuple[Any, tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[Draw], Made]] = {}


def case(function: Callable[[Draw], Any]) -> Callable[[Draw], Any]:
    """Adds a case: ``func, *args`` with keyword arguments last, if it is a dictionary."""

    def made(draw: Draw) -> Made:
        func, *args = function(draw)
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        return func, tuple(args), kwargs

    CASES[function.__name__] = made
    return function


def _simple(name: str, make: Callable[[Draw], Any]) -> None:
    make.__name__ = name
    case(make)


def _plain(**cases: Callable[[Draw], Any]) -> None:
    """Cases that are one expression."""
    for name, make in cases.items():
        _simple(name, make)


def _sized(num: int, **cases: Callable[..., Any]) -> None:
    """The same, of so many sizes."""
    for name, make in cases.items():
        _simple(name, lambda d, make=make: make(d, *d.sizes(num)))


def _shaped(ndim: int, **cases: Callable[..., Any]) -> None:
    """The same, of a shape of so many dimensions."""
    for name, make in cases.items():
        _simple(name, lambda d, make=make: make(d, d.sizes(ndim)))


_sized(
    3,
    mm=lambda d, m, k, n: (aten.mm.default, d.tensor(m, k), d.tensor(k, n)),
    addmm=lambda d, m, k, n: (
        aten.addmm.default,
        d.stretched([m, n]),
        d.tensor(m, k),
        d.tensor(k, n),
        {"alpha": 2.0, "beta": 0.5},
    ),
    view_split=lambda d, a, b, c: (
        aten.view.default,
        d.dense(a * b, c),
        [a, b, c] if d.flag() else [a, b * c],
    ),
    expand=lambda d, a, b, c: (aten.expand.default, d.tensor(a if d.flag() else 1, b), [c, a, -1]),
)
_sized(
    4,
    bmm=lambda d, b, m, k, n: (aten.bmm.default, d.tensor(b, m, k), d.tensor(b, k, n)),
    baddbmm=lambda d, b, m, k, n: (
        aten.baddbmm.default,
        d.stretched([b, m, n]),
        d.tensor(b, m, k),
        d.tensor(b, k, n),
    ),
)
_sized(
    2,
    mv=lambda d, m, k: (aten.mv.default, d.tensor(m, k), d.tensor(k)),
    addmv=lambda d, m, k: (aten.addmv.default, d.tensor(m), d.tensor(m, k), d.tensor(k)),
)
_plain(
    add_number=lambda d: (aten.add.Tensor, d.tensor(*d.sizes(2)), 3.0),
    mul_number=lambda d: (aten.mul.Tensor, d.tensor(*d.sizes(2)), 3.0),
    to_copy=lambda d: (
        aten._to_copy.default,
        d.tensor(*d.sizes(2)),
        {"dtype": torch.complex128 if d.flag() else torch.int64},
    ),
    pow_number=lambda d: (aten.pow.Tensor_Scalar, d.tensor(*d.sizes(2)), 2),
    clone_contiguous=lambda d: (
        aten.clone.default,
        d.tensor(*d.sizes(3)),
        {"memory_format": torch.contiguous_format},
    ),
    relu_in_place=lambda d: (aten.relu_.default, d.tensor(*d.sizes(2))),
    fill_in_place=lambda d: (aten.fill_.Scalar, d.tensor(*d.sizes(2)), 0.0 if d.flag() else 2.0),
    zero_in_place=lambda d: (aten.zero_.default, d.tensor(*d.sizes(2))),
    sum_of_all=lambda d: (aten.sum.default, d.tensor(*d.sizes(d.size(0, 3)))),
    mean_of_all=lambda d: (aten.mean.default, d.tensor(*d.sizes(d.size(0, 3)))),
    max_of_all=lambda d: (aten.max.default, d.tensor(*d.sizes(d.size(1, 3)))),
    max_of_dim=lambda d: (aten.max.dim, d.tensor(*d.sizes(2)), d.dim(2), d.flag()),
    argmax=lambda d: (aten.argmax.default, d.tensor(*d.sizes(2)), d.dim(2), d.flag()),
    cumsum=lambda d: (aten.cumsum.default, d.tensor(*d.sizes(2)), d.dim(2)),
    sort=lambda d: (aten.sort.default, d.tensor(*d.sizes(2)), d.dim(2)),
    topk=lambda d: (aten.topk.default, d.tensor(*d.sizes(2, least=2)), 2, d.dim(2)),
    transpose=lambda d: (aten.transpose.int, d.tensor(*d.sizes(3)), d.dim(3), d.dim(3)),
    matrix_transposed=lambda d: (aten.t.default, d.tensor(*d.sizes(d.size(1, 2)))),
    unsqueeze=lambda d: (aten.unsqueeze.default, d.tensor(*d.sizes(2)), d.dim(3)),
    squeeze=lambda d: (aten.squeeze.default, d.tensor(*d.sizes(3, most=2))),
    squeeze_dim=lambda d: (aten.squeeze.dim, d.tensor(*d.sizes(3, most=2)), d.dim(3)),
    select=lambda d: (aten.select.int, d.tensor(*d.sizes(3)), d.dim(3), d.random.choice([0, -1])),
    split=lambda d: (aten.split.Tensor, d.tensor(*d.sizes(2)), d.size(1, 3), d.dim(2)),
    unbind=lambda d: (aten.unbind.int, d.tensor(*d.sizes(2)), d.dim(2)),
    flip=lambda d: (aten.flip.default, d.tensor(*d.sizes(2)), d.random.choice([[0], [1], [-1, 0], []])),
    roll=lambda d: (
        aten.roll.default,
        d.tensor(*d.sizes(2)),
        *d.random.choice([([1], [0]), ([1, 2], [0, -1]), ([3], [])]),
    ),
    tril=lambda d: (aten.tril.default, d.tensor(*d.sizes(3)), d.size(-1, 1)),
    diagonal=lambda d: (aten.diagonal.default, d.tensor(*d.sizes(3)), 0, d.random.choice([0, 1]), 2),
    unfold=lambda d: (aten.unfold.default, d.tensor(*d.sizes(2, least=3)), d.dim(2), 2, 1),
    pad=lambda d: (
        aten.constant_pad_nd.default,
        d.tensor(*d.sizes(3)),
        d.random.choice([[1, 0], [0, 0, 1, 2]]),
        d.size(0, 1),
    ),
    repeat=lambda d: (
        aten.repeat.default,
        d.tensor(*d.sizes(2)),
        d.random.choice([[2, 1], [1, 3], [2, 1, 2]]),
    ),
    as_strided=lambda d: (aten.as_strided.default, d.dense(4, 3), [2, 2], [3, 1], d.size(0, 2)),
    view_as_complex=lambda d: (aten.view_as_complex.default, d.dense(*d.sizes(2), 2)),
    max_pool=lambda d: (aten.max_pool2d_with_indices.default, d.dense(d.size(), d.size(), 4, 4), [2, 2]),
    nonzero=lambda d: (aten.nonzero.default, d.mask(*d.sizes(2))),
    zeros_like=lambda d: (aten.zeros_like.default, d.tensor(*d.sizes(2))),
    normal_in_place=lambda d: (
        aten.normal_.default,
        d.tensor(*d.sizes(2)),
        1.0,
        2.0,
        {"generator": torch.Generator().manual_seed(4)},
    ),
    foreach_norm=lambda d: (
        aten._foreach_norm.Scalar,
        [d.tensor(*d.sizes(2)) for _ in range(3)],
        d.random.choice([1.0, 2.0]),
    ),
    no_rule_item=lambda d: (aten._local_scalar_dense.default, d.dense(1)),
)
_shaped(
    2,
    add_alpha=lambda d, shape: (aten.add.Tensor, d.tensor(*shape), d.tensor(*shape), {"alpha": 2}),
    where=lambda d, shape: (aten.where.self, d.mask(*shape), d.stretched(shape), d.stretched(shape)),
    masked_fill=lambda d, shape: (
        aten.masked_fill.Scalar,
        d.tensor(*shape),
        d.mask(*shape),
        0.0 if d.flag() else -1e30,
    ),
    addcmul=lambda d, shape: (
        aten.addcmul.default,
        d.tensor(*shape),
        d.stretched(shape),
        d.tensor(*shape),
        {"value": 0.5},
    ),
    addcdiv=lambda d, shape: (aten.addcdiv.default, d.tensor(*shape), d.stretched(shape), d.tensor(*shape)),
    lerp=lambda d, shape: (aten.lerp.Scalar, d.tensor(*shape), d.tensor(*shape), 0.3),
    native_dropout_backward=lambda d, shape: (
        aten.native_dropout_backward.default,
        d.tensor(*shape),
        d.mask(*shape),
        1.25,
    ),
    add_in_place=lambda d, shape: (aten.add_.Tensor, d.tensor(*shape), d.stretched(shape)),
    masked_fill_in_place=lambda d, shape: (aten.masked_fill_.Scalar, d.tensor(*shape), d.mask(*shape), 2.0),
    add_out=lambda d, shape: (aten.add.out, d.tensor(*shape), d.tensor(*shape), {"out": d.tensor(*shape)}),
    mse_loss=lambda d, shape: (aten.mse_loss.default, d.tensor(*shape), d.tensor(*shape), d.size(0, 2)),
    stack=lambda d, shape: (aten.stack.default, [d.tensor(*shape) for _ in range(d.size(1, 3))], d.dim(3)),
    view_as_real=lambda d, shape: (
        aten.view_as_real.default,
        torch.complex(d.dense(*shape), d.dense(*shape)),
    ),
    index_by_mask=lambda d, shape: (aten.index.Tensor, d.tensor(*shape), [d.mask(shape[0])]),
    new_zeros=lambda d, shape: (aten.new_zeros.default, d.tensor(*shape), shape if d.flag() else [3]),
)
_shaped(
    3,
    rms_norm=lambda d, shape: (
        aten._fused_rms_norm.default,
        d.dense(*shape),
        shape[-1:],
        d.dense(shape[-1]),
        1e-05,
    ),
)


@case
def dot(d):
    k = d.size()
    return aten.dot.default, d.tensor(k), d.tensor(k)


for _name in "add sub mul div maximum fmod atan2 eq lt remainder".split():
    _overload = getattr(aten, _name)
    _overload = getattr(_overload, "Tensor", None) or _overload.default

    def _binary(d, overload=_overload):
        shape = d.sizes(d.size(0, 3))
        return overload, d.stretched(shape), d.tensor(*shape)

    _simple(_name, _binary)

for _name in "relu gelu exp neg abs sigmoid sqrt silu isnan erf round".split():

    def _unary(d, name=_name):
        return getattr(aten, name).default, d.tensor(*d.sizes(d.size(0, 3)))

    _simple(_name, _unary)

for _name in "threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward".split():

    def _backward(d, name=_name):
        shape = d.sizes(d.size(0, 3))
        more = (0.1,) if name == "threshold_backward" else ()
        return getattr(aten, name).default, d.tensor(*shape), d.tensor(*shape), *more

    _simple(_name, _backward)


for _name in "sum mean amax amin var logsumexp prod any all".split():

    def _reduction(d, name=_name):
        shape = d.sizes(d.size(1, 3), least=2)
        dims = sorted(d.random.sample(range(len(shape)), d.size(1, len(shape))))
        keep = d.flag()
        data = d.tensor(*shape)
        match name:
            case "var":
                return aten.var.correction, data, dims, {"correction": 1, "keepdim": keep}
            case "sum" | "mean":
                return getattr(aten, name).dim, data, dims, keep
            case "prod":
                return aten.prod.dim_int, data, dims[0], keep
            case "any" | "all":
                return getattr(aten, name).dim, data > 0, dims[0], keep
        return getattr(aten, name).default, data, dims, keep

    if _name == "sum":

        def _reduction_of_sum(d):
            shape = d.sizes(d.size(1, 3), least=2)
            dims = sorted(d.random.sample(range(len(shape)), d.size(1, len(shape))))
            return aten.sum.dim_IntList, d.tensor(*shape), dims, d.flag()

        _simple("sum", _reduction_of_sum)
    else:
        _simple(_name, _reduction)


@case
def norm(d):
    order = d.random.choice([1.0, 2.0, float("inf"), 0.0])
    shape = d.sizes(2)
    dims = d.random.choice([None, [0], [1], [0, 1]])
    return aten.linalg_vector_norm.default, d.tensor(*shape), order, dims, d.flag()


for _name in ("_softmax", "_log_softmax"):

    def _softmax(d, name=_name):
        return getattr(aten, name).default, d.tensor(*d.sizes(3)), d.dim(3), False

    def _softmax_backward(d, name=_name):
        shape, dim = d.sizes(3), d.dim(3)
        output = d.tensor(*shape).softmax(dim)
        output = output.log() if "log" in name else output
        return getattr(aten, f"{name}_backward_data").default, d.tensor(*shape), output, dim, torch.float64

    _simple(_name, _softmax)
    _simple(f"{_name}_backward", _softmax_backward)


@case
def nll_loss(d):
    n, c = d.sizes(2, least=2)
    target = d.index(c, n)
    target[0] = -100
    weight = d.tensor(c).abs() if d.flag() else None
    return aten.nll_loss_forward.default, d.tensor(n, c), target, weight, d.size(0, 2), -100


@case
def nll_loss_backward(d):
    n, c = d.sizes(2, least=2)
    reduction = d.size(0, 2)
    target = d.index(c, n)
    target[0] = -100
    total = (target != -100).sum().double() if reduction else torch.zeros((), dtype=torch.float64)
    outer = d.tensor(n) if reduction == 0 else d.tensor()
    weight = d.tensor(c).abs() if d.flag() else None
    return aten.nll_loss_backward.default, outer, d.tensor(n, c), target, weight, reduction, -100, total


@case
def binary_cross_entropy_with_logits(d):
    shape = d.sizes(2)
    return (
        aten.binary_cross_entropy_with_logits.default,
        d.tensor(*shape),
        d.tensor(*shape).sigmoid(),
        None,
        d.stretched(shape) if d.flag() else None,
        d.size(0, 2),
    )


@case
def embedding(d):
    v, e = d.size(2, 7), d.size()
    return aten.embedding.default, d.tensor(v, e), d.index(v, *d.sizes(d.size(0, 2)))


@case
def embedding_dense_backward(d):
    v, e = d.size(2, 7), d.size()
    shape = d.sizes(d.size(1, 2))
    return (
        aten.embedding_dense_backward.default,
        d.tensor(*shape, e),
        d.index(v, *shape),
        v,
        d.random.choice([-1, 1]),
        False,
    )


@case
def view(d):
    shape = d.sizes(3)
    target = d.random.choice(
        [[-1], [shape[0] * shape[1], shape[2]], [shape[0], -1], [1, *shape], [*shape[:2], 1, shape[2]]]
    )
    return aten.view.default, d.dense(*shape), target


@case
def permute(d):
    order = [0, 1, 2]
    d.random.shuffle(order)
    return aten.permute.default, d.tensor(*d.sizes(3)), order


@case
def slice_some(d):
    shape = d.sizes(2, least=2)
    dim = d.dim(2)
    start = d.random.choice([None, 0, 1, -2])
    end = d.random.choice([None, 1, 3, -1, 2**63 - 1])
    return aten.slice.Tensor, d.tensor(*shape), dim, start, end, d.random.choice([1, 1, 2])


@case
def split_with_sizes(d):
    sizes = d.sizes(3, least=0)
    other = d.size()
    dim = d.size(0, 1)
    shape = [other, sum(sizes)] if dim else [sum(sizes), other]
    return aten.split_with_sizes.default, d.tensor(*shape), sizes, dim


@case
def cat(d):
    dim, other = d.size(0, 1), d.size()
    sizes = d.sizes(d.size(1, 3))
    return aten.cat.default, [d.tensor(*([other, size] if dim else [size, other])) for size in sizes], dim


@case
def slice_backward(d):
    shape = d.sizes(2, least=2)
    dim, step = d.size(0, 1), d.random.choice([1, 1, 2])
    whole = torch.zeros(shape)
    start, end = 1, d.random.choice([shape[dim], 2**63 - 1])
    part = aten.slice.Tensor(whole, dim, start, end, step)
    return aten.slice_backward.default, d.tensor(*part.shape), shape, dim, start, end, step


@case
def select_backward(d):
    shape = d.sizes(3)
    dim = d.size(0, 2)
    own = [size for each, size in enumerate(shape) if each != dim]
    return aten.select_backward.default, d.tensor(*own), shape, dim, 0


@case
def slice_scatter(d):
    shape = d.sizes(2, least=2)
    return aten.slice_scatter.default, d.tensor(*shape), d.tensor(1, shape[1]), 0, 1, 2


def _heads(d):
    groups = d.random.choice([1, 1, 2, 3])
    keys = d.random.choice([1, 2, 4])
    return d.size(1, 3), groups * keys, keys, d.size(1, 4), d.size(1, 4), 4


@case
def attention(d):
    b, h, g, q, k, e = _heads(d)
    mask = {"attn_mask": d.stretched([b, h, q, k])} if d.flag() else {}
    if mask and mask["attn_mask"].dim() not in (2, 4):
        mask = {"attn_mask": d.tensor(b, 1, q, k)}
    causal = not mask and d.flag()
    qkv = (d.dense(b, h, q, e), d.dense(b, g, k, e), d.dense(b, g, k, e))
    return aten._scaled_dot_product_flash_attention_for_cpu.default, *qkv, 0.0, causal, mask


@case
def attention_backward(d):
    b, h, g, q, k, e = _heads(d)
    causal = d.flag()
    query, key, value = d.dense(b, h, q, e), d.dense(b, g, k, e), d.dense(b, g, k, e)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel.default(query, key, value, 0.0, causal)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward, d.dense(b, h, q, e), query, key, value, output, lse, 0.0, causal


@case
def layer_norm(d):
    shape = d.sizes(3)
    n = d.size(1, 2)
    own = shape[-n:]
    affine = (d.dense(*own), d.dense(*own)) if d.flag() else (None, None)
    return aten.native_layer_norm.default, d.tensor(*shape), own, *affine, 1e-5


@case
def layer_norm_backward(d):
    shape = d.sizes(3, least=2)
    own = shape[-1:]
    data, weight, bias = d.dense(*shape), d.dense(*own), d.dense(*own)
    _, mean, rstd = aten.native_layer_norm.default(data, own, weight, bias, 1e-5)
    mask = [True, d.flag(), d.flag()]
    gradient = d.dense(*shape)
    return aten.native_layer_norm_backward.default, gradient, data, own, mean, rstd, weight, bias, mask


@case
def group_norm_backward(d):
    n, g, c, s = d.sizes(4)
    channels = g * c
    data, weight = d.dense(n, channels, s), d.dense(channels)
    _, mean, rstd = aten.native_group_norm.default(data, weight, weight, n, channels, s, g, 1e-5)
    gradient = d.dense(n, channels, s)
    backward = aten.native_group_norm_backward.default
    return backward, gradient, data, mean, rstd, weight, n, channels, s, g, [True, True, True]


@case
def batch_norm(d):
    n, c, s = d.sizes(3, least=2)
    train = d.flag()
    statistics = (d.dense(c), d.dense(c).exp())
    data = d.dense(n, c, s)
    return aten.native_batch_norm.default, data, d.dense(c), d.dense(c), *statistics, train, 0.1, 1e-5


@case
def batch_norm_backward(d):
    n, c, s = d.sizes(3, least=2)
    data, weight = d.dense(n, c, s), d.dense(c)
    mean, variance = d.dense(c), d.dense(c).exp()
    _, save_mean, rstd = aten.native_batch_norm.default(data, weight, weight, mean, variance, True, 0.1, 1e-5)
    backward = aten.native_batch_norm_backward.default
    gradient = d.dense(n, c, s)
    return backward, gradient, data, weight, mean, variance, save_mean, rstd, True, 1e-5, [True, True, True]


def _convolution(d):
    groups = d.random.choice([1, 1, 2, 4])
    c_in, c_out = groups * d.size(1, 2), groups * d.size(1, 2)
    transposed = d.random.random() < 0.3
    n = d.size(1, 3)
    data = d.dense(n, c_in, 6)
    weight = d.dense(c_in, c_out // groups, 3) if transposed else d.dense(c_out, c_in // groups, 3)
    return data, weight, d.dense(c_out), [1], [1], [1], transposed, [0], groups


@case
def convolution(d):
    data, weight, bias, *more = _convolution(d)
    return aten.convolution.default, data, weight, bias if d.flag() else None, *more


@case
def convolution_backward(d):
    data, weight, bias, *more = _convolution(d)
    result = aten.convolution.default(data, weight, bias, *more)
    gradient = d.dense(*result.shape)
    sizes = [bias.shape[0]]
    return aten.convolution_backward.default, gradient, data, weight, sizes, *more, [True, True, True]


@case
def index_select(d):
    shape = d.sizes(2)
    dim = d.size(0, 1)
    return aten.index_select.default, d.tensor(*shape), dim, d.index(shape[dim], d.size())


@case
def index_add(d):
    shape = d.sizes(2)
    dim = d.size(0, 1)
    count = d.size()
    source = [count if each == dim else size for each, size in enumerate(shape)]
    return aten.index_add.default, d.tensor(*shape), dim, d.index(shape[dim], count), d.tensor(*source)


@case
def index_copy(d):
    shape = d.sizes(2)
    index = torch.randperm(shape[0], generator=d.generator)
    return aten.index_copy.default, d.tensor(*shape), 0, index, d.tensor(*shape)


@case
def gather(d):
    shape = d.sizes(2)
    dim = d.size(0, 1)
    own = [d.size(1, size) if d.flag() else size for size in shape]
    own[dim] = d.size()
    return aten.gather.default, d.tensor(*shape), dim, d.index(shape[dim], *own)


@case
def scatter_add(d):
    shape = d.sizes(2)
    dim = d.size(0, 1)
    own = list(shape)
    own[dim] = d.size()
    return aten.scatter_add.default, d.tensor(*shape), dim, d.index(shape[dim], *own), d.tensor(*own)


@case
def index(d):
    shape = d.sizes(3)
    which = d.random.choice([(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
    own = d.sizes(d.size(1, 2))
    indices = [d.index(shape[dim], *own) if dim in which else None for dim in range(3)]
    if len(which) == 2 and d.flag():
        indices[which[0]] = indices[which[0]][:1]
    return aten.index.Tensor, d.tensor(*shape), indices


@case
def index_put(d):
    func, data, indices = index(d)
    values = func(data, indices)
    accumulate = d.flag()
    if not accumulate:
        # Each place at most once, or the result is any of them.
        indices = [None if each is None else each.flatten()[:1] for each in indices]
        values = func(data, indices)
    own = d.stretched(list(values.shape)) if d.flag() else d.tensor(*values.shape)
    return aten.index_put.default, data, indices, own, accumulate


@case
def foreach_add_in_place(d):
    shapes = [d.sizes(2) for _ in range(3)]
    return aten._foreach_add_.List, [d.tensor(*each) for each in shapes], [d.tensor(*each) for each in shapes]


@case
def fused_adamw(d):
    shapes = [d.sizes(2) for _ in range(2)]
    # The kernel takes for granted that all of them lie in memory alike.
    lists = [[d.dense(*each) for each in shapes] for _ in range(3)]
    variances = [d.dense(*each).abs() + 0.1 for each in shapes]
    steps = [torch.tensor(3.0) for _ in shapes]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8}
    numbers |= {"amsgrad": False, "maximize": False}
    return aten._fused_adamw_.default, *lists, variances, [], steps, numbers


@case
def no_rule_inverse(d):
    n = d.size(2, 3)
    return aten.linalg_inv_ex.default, d.dense(n, n) + 4 * torch.eye(n, dtype=torch.float64)
