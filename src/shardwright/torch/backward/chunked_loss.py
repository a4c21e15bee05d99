"""A loss of logits that never stand in memory whole: piece by piece, with their gradients at once.

::

    rows of x ─┬─ piece 1 ─ linear ─ logits ─ loss, gradient of logits ──► grad_x of the piece, += grad_weight
               ├─ piece 2 ─ ...                                            (and the logits of the piece go)
               └─ ...

A loss that is a sum over rows has its gradients computed in its forward: its backward only scales them, and
no product is made twice. Where each row has a result of its own (reduction "none", logsumexp, log
probabilities), the gradient comes later, and the backward computes the logits again, piece by piece, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch._private.modules import backward_keeps_graph
from shardwright.torch._private.tensors import outside_of_functions

RowFunction = Callable[[Tensor, Tensor | None], Tensor]
"""(logits (n, V), what belongs to these rows) -> a sum over them, or something for each row (n, *)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedRows:
    """What is made of rows: logits, what each of them becomes, and a loss.

    Attributes:
        dtype: in which the head computes.
        each: what becomes of logits, row by row, before the loss.
        sums: the loss is one number.
        size: rows of a piece.
    """

    dtype: torch.dtype
    each: tuple[Callable[[Tensor], Tensor], ...]
    loss: RowFunction
    sums: bool
    size: int
    trains: bool

    def pieces(self, num_rows: int) -> Iterator[slice]:
        return (slice(first, first + self.size) for first in range(0, num_rows, self.size))

    def of_logits(self, logits: Tensor, beside: Tensor | None) -> Tensor:
        for each in self.each:
            logits = each(logits)
        return self.loss(logits, beside)

    def with_gradient(
        self, logits: Tensor, beside: Tensor | None, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of a piece, and the gradient of its logits."""
        # What it saves is for here: nobody has to count it, or to move it elsewhere.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            found = self.of_logits(logits.requires_grad_(), beside)
        (made,) = torch.autograd.grad(found, logits, gradient)
        return found.detach(), made


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Gradients:
    """Of a head and its rows, added up over pieces."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]):
        self._weight = weight
        self.of_x = torch.empty_like(x) if wanted[0] else None
        # Not divided yet by the number of rows, a sum over them may be too large for half precision.
        exact = torch.float32 if weight.dtype is torch.float16 else weight.dtype
        self.of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        self.of_bias = torch.zeros_like(bias) if wanted[2] and bias is not None else None

    def add(self, piece: slice, rows: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Adds those of a piece; rows (n, H) and weight (V, H) as the head computes with them."""
        if self.of_x is not None:
            if self.of_x.dtype is gradient.dtype:
                torch.mm(gradient, weight, out=self.of_x[piece])
            else:
                self.of_x[piece] = gradient @ weight
        if self.of_weight is not None:
            if self.of_weight.dtype is gradient.dtype:
                self.of_weight.addmm_(gradient.t(), rows)
            else:
                self.of_weight += gradient.t() @ rows
        if self.of_bias is not None:
            self.of_bias += gradient.sum(0)

    @property
    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.of_x, self.of_weight, self.of_bias


class _ChunkedLoss(torch.autograd.Function):
    """See `chunked_loss`. Its node has `reduction`, `count` and `rows`, as a loss's form is read from it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        beside: Tensor | None,
        count: Tensor | None,
        how: ChunkedRows,
    ) -> Tensor:
        at_once = how.sums and how.trains
        found: list[Tensor] = []
        with outside_of_functions():
            own, own_bias = _in(how.dtype, weight, bias)
            made = _Gradients(x, weight, bias, ctx.needs_input_grad[:3]) if at_once else None
            for piece in how.pieces(len(x)):
                rows = x[piece].to(how.dtype)
                logits = _linear(rows, own, own_bias)
                row_values = None if beside is None else beside[piece]
                if made is None:
                    found.append(how.of_logits(logits, row_values))
                    continue
                loss, gradient = how.with_gradient(logits, row_values, None)
                del logits
                found.append(loss)
                made.add(piece, rows, own, gradient)
                del gradient
            result = torch.cat(found) if not how.sums else _total(found, count)
        ctx.how, ctx.count, ctx.rows = how, count, (len(x),)
        ctx.reduction = 0 if not how.sums else 2 if count is None else 1
        kept = (x, weight, bias, beside) if made is None else made.all
        ctx.save_for_backward(*kept)
        # The state of autocast is that of the forward when logits are computed again.
        kind = x.device.type
        ctx.autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "a gradient of a gradient (create_graph) goes through a loss whose logits are computed piece "
                "by piece, and which has none: set loss_chunks: off."
            )
        (gradient,) = gradients
        how: ChunkedRows = ctx.how
        with outside_of_functions():
            if how.sums:
                if ctx.count is not None:  # where nothing counts, rows have no gradient
                    gradient = torch.where(ctx.count == 0, 0, gradient / ctx.count)
                found = tuple(None if each is None else _scaled(each, gradient) for each in ctx.saved_tensors)
                return (*found, None, None, None)
            x, weight, bias, beside = ctx.saved_tensors
            own, own_bias = _in(how.dtype, weight, bias)
            made = _Gradients(x, weight, bias, ctx.needs_input_grad[:3])
            kind, enabled, dtype = ctx.autocast
            for piece in how.pieces(len(x)):
                rows = x[piece].to(how.dtype)
                logits = _linear(rows, own, own_bias)
                with torch.autocast(kind, dtype=dtype, enabled=enabled):
                    row_values = None if beside is None else beside[piece]
                    _, of_logits = how.with_gradient(logits, row_values, gradient[piece])
                made.add(piece, rows, own, of_logits)
        return (*made.all, None, None, None)


def _total(found: list[Tensor], count: Tensor | None) -> Tensor:
    """A sum over pieces, or a mean, added up in single precision at least."""
    dtype = torch.float64 if found[0].dtype is torch.float64 else torch.float32
    total = torch.stack(found).sum(dtype=dtype)
    return (total if count is None else total / count).to(found[0].dtype)


def _in(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return F.linear(rows, weight, bias)


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """A product; in the same memory where nobody needs the tensor again."""
    factor = factor.to(tensor.dtype) if factor.dim() else factor
    return tensor * factor if backward_keeps_graph() else tensor.mul_(factor)


def chunked_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    beside: Tensor | None,
    how: ChunkedRows,
    *,
    count: Tensor | None = None,
) -> Tensor:
    """What a loss makes of the logits of a linear head, without logits of more than a piece of the rows.

    Args:
        x: (*, H); the rows of its first dims.
        weight: (V, H).
        bias: (V,).
        beside: (rows, *): what the loss takes for each row.
        count: of a mean: by how much the sum is divided; 0-dim.

    Returns:
        A number, or (rows, *).
    """
    function: Any = _ChunkedLoss
    made: Tensor = function.apply(x.reshape(-1, x.shape[-1]), weight, bias, beside, count, how)
    return made
