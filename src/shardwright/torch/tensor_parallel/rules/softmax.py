"""Softmax, losses over classes, look-ups in a table: the classes are cut, or the rows."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, Placement
from shardwright.torch.tensor_parallel.call import Call, Candidate, Form, broadcast, candidates_of, rule
from shardwright.torch.tensor_parallel.group import TensorGroup


def own_rows(index: Tensor, cut: Cut, rank: int) -> tuple[Tensor, Tensor]:
    """Where the rows with these numbers are in a rank's part of them."""
    rows = torch.zeros_like(index)
    is_own = torch.zeros_like(index, dtype=torch.bool)
    start = 0
    for a, b in cut.intervals(rank):
        inside = (index >= a) & (index < b)
        rows = torch.where(inside, index - a + start, rows)
        is_own |= inside
        start += b - a
    return rows, is_own


@rule("embedding")
def embedding(call: Call) -> list[Candidate]:
    """A rank with some rows looks those up, and has zeros for the rest: a summand of the result."""
    table, index = call.inputs
    places = tuple(range(index.ndim))
    form = Form((("v", "d"), places), ((*places, "d"),), uncut=frozenset("v"), terms=((0,),))
    found = candidates_of(call, form)
    if table.cut is not None and table.cut.dim == 0:
        cut = table.cut
        call.group.cuts["table", table.shape[0]] = cut

        def look_up(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
            rows, is_own = own_rows(args[1], cut, group.rank)
            if not cut.length(group.rank):
                return args[0].new_zeros(*rows.shape, args[0].shape[1])  # type: ignore[no-any-return]
            return func(args[0], rows) * is_own[..., None]  # type: ignore[no-any-return]

        found.append(Candidate((cut, WHOLE), (PARTIAL_SUM,), compute=look_up))
    return found


@rule("embedding_dense_backward")
def gradient_of_table(call: Call) -> list[Candidate] | None:
    """Every rank makes the gradient of its own rows, if the ranks shared those of the table."""
    index = call.inputs[1]
    if call["scale_grad_by_freq"]:
        return None
    places = tuple(range(index.ndim))
    form = Form(((*places, "d"), places), (("v", "d"),), sums=(frozenset(places),), terms=((0,),))
    found = candidates_of(call, form)
    cut = call.group.cuts.get(("table", call["num_weights"]))
    if cut is not None:
        padding = call["padding_idx"]

        def of_own_rows(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
            values: Tensor = args[0]
            wanted: Tensor = args[1]
            rows, is_own = own_rows(wanted, cut, group.rank)
            is_own = is_own & (wanted != padding)
            table: Tensor = values.new_zeros(cut.length(group.rank), values.shape[-1])
            if len(table):
                # How many rows are own ones depends on values, which a dry run has none of.
                own = torch.where(is_own[..., None], values, torch.zeros_like(values))
                table.index_add_(0, rows.reshape(-1), own.reshape(-1, values.shape[-1]))
            return table

        found.append(Candidate((WHOLE, WHOLE), (cut,), compute=of_own_rows, share=1 / call.num_ranks))
    return found


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


_NONE, _MEAN, _SUM = 0, 1, 2


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call) -> list[Candidate] | None:
    """The logarithm of the target's probability is on the rank that has the target's class."""
    scores = call.inputs[0]
    classes = 1 if scores.ndim > 1 else 0
    cut = scores.cut
    if cut is None or (cut.dim != classes and cut.dim != 0):
        return None
    reduction, ignored = call["reduction"], call["ignore_index"]
    is_row = cut.dim != classes

    def forward(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> tuple[Tensor, Tensor]:
        data, wanted, weight = args[:3]
        counts = wanted != ignored
        weights = None if weight is None else _weights(weight, wanted, counts)
        rows, picked = _picked(wanted, counts, None if is_row else cut, group.rank)
        if data.shape[classes]:
            losses = -data.gather(classes, rows.unsqueeze(classes)).squeeze(classes)
            losses = torch.where(picked, losses, torch.zeros((), dtype=data.dtype, device=data.device))
            losses = losses if weights is None else losses * weights
        else:
            losses = data.new_zeros(rows.shape)
        if reduction == _NONE:
            return losses, data.new_zeros(())
        total = counts.sum().to(data.dtype) if weights is None else weights.sum()
        if is_row:
            total = group.reduce(total)
        loss = losses.sum()
        return (loss / total if reduction == _MEAN else loss), total

    of_target: Placement = cut if is_row else WHOLE
    of_loss: Placement = cut if is_row and reduction == _NONE else PARTIAL_SUM
    inputs: tuple[Placement, ...] = (cut, of_target, *(WHOLE for _ in call.inputs[2:]))
    return [Candidate(inputs, (of_loss, WHOLE), compute=forward, share=1 / call.num_ranks)]


@rule("nll_loss_backward", "nll_loss2d_backward")
def gradient_of_nll_loss(call: Call) -> list[Candidate] | None:
    """Each rank writes the gradient of its own classes, or rows."""
    gradient, scores = call.inputs[:2]
    classes = 1 if scores.ndim > 1 else 0
    cut = scores.cut
    if cut is None or (cut.dim != classes and cut.dim != 0):
        return None
    reduction, ignored = call["reduction"], call["ignore_index"]
    is_row = cut.dim != classes

    def backward(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        outer, data, wanted, weight = args[:4]
        total = args[-1]
        counts = wanted != ignored
        rows, picked = _picked(wanted, counts, None if is_row else cut, group.rank)
        result = torch.zeros_like(data)
        if not data.shape[classes]:
            return result
        values = -outer / total if reduction == _MEAN else -outer
        if weight is not None:
            values = values * _weights(weight, wanted, counts)
        values = torch.where(picked, values.expand(rows.shape), torch.zeros_like(values))
        return result.scatter_(classes, rows.unsqueeze(classes), values.unsqueeze(classes))

    of_gradient: Placement = cut.at(0) if is_row and gradient.ndim else WHOLE
    of_target = cut.at(0) if is_row else WHOLE
    inputs: tuple[Placement, ...] = (of_gradient, cut, of_target, *(WHOLE for _ in call.inputs[3:]))
    return [Candidate(inputs, (cut,), compute=backward, share=1 / call.num_ranks)]


def _picked(wanted: Tensor, counts: Tensor, cut: Cut | None, rank: int) -> tuple[Tensor, Tensor]:
    """The row of each target's class in a rank's part of them, and whether it is there, and counts."""
    if cut is None:
        return torch.where(counts, wanted, 0), counts
    rows, is_own = own_rows(wanted, cut, rank)
    return rows, counts & is_own


def _weights(weight: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """The weight of each target's class; 0 of those that are ignored."""
    return weight[torch.where(counts, wanted, 0)] * counts


_ELEMENTWISE = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)


@rule(*_ELEMENTWISE)
def elementwise_loss(call: Call) -> Form | list[Candidate] | None:
    """A loss of each element, and perhaps their sum or mean."""
    shape = call.inputs[0].shape
    if any(one.ndim > len(shape) for one in call.inputs) or call.inputs[1].shape != shape:
        return None
    names = tuple(range(len(shape)))
    inputs = tuple(broadcast(one.shape, shape) for one in call.inputs)
    reduction = call["reduction"]
    if reduction == _NONE:
        return Form(inputs, (names,))
    found = candidates_of(call, Form(inputs, ((),), sums=(frozenset(names),)))
    if reduction == _SUM:
        return found
    count = call.inputs[0].numel

    place = [argument.name for argument in call.func._schema.arguments].index("reduction")

    def part_of_mean(group: TensorGroup, func: Any, args: list[Any], kwargs: Any) -> Tensor:
        # The mean is the default, so it may not be among the arguments.
        given = [*args[:place], *[None] * (place - len(args)), _SUM, *args[place + 1 :]]
        return func(*given, **kwargs) / count  # type: ignore[no-any-return]

    return [
        Candidate(each.inputs, each.outputs, compute=part_of_mean, share=each.share)
        if any(isinstance(placement, Cut) for placement in each.inputs)
        else each
        for each in found
    ]
