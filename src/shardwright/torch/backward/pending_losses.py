"""What losses make of logits that nobody has computed yet, piece by piece: see `pending_logits`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.backward.chunked_loss import ChunkedRows, RowFunction, chunked_loss
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.pytorch.modules import user_line


class Head(Protocol):
    """Whose logits they are: see `waiting_heads`."""

    def rows_of_piece(self, num_rows: int) -> int:
        """So many of these."""
        ...

    def gave_whole(self, *, trains: bool) -> None:
        """Its logits were needed otherwise than in a loss."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """What logits will be made of.

    Attributes:
        x: (*, H).
        each: what becomes of them, row by row.
        channels: they have the shape (N, V, *), and not (*, V).
        given: what must not change before they are computed, and its version as the head was called.
        are_whole: not empty once somebody has them whole, who may change them: then all who share their
            memory have.
        in_pieces: not empty once a loss has computed them so.
    """

    head: Head
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    each: tuple[Callable[[Tensor], Tensor], ...] = ()
    channels: bool = False
    given: tuple[tuple[Tensor, int], ...]
    trains: bool
    are_whole: list[bool] = field(default_factory=list)
    in_pieces: list[bool] = field(default_factory=list)

    def computed(self) -> Tensor:
        """The logits, whole."""
        self.refuse_changes()
        with torch.autocast(self.x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            made = F.linear(self.x.to(self.dtype), self.weight.to(self.dtype), bias)
            for each in self.each:
                made = each(made)
            return made.movedim(-1, 1) if self.channels else made

    def refuse_changes(self) -> None:
        """The head would have computed with what was there when it was called."""
        for tensor, version in self.given:
            # Rows of sharded parameters come and go.
            if type(tensor) in (Tensor, nn.Parameter) and tensor._version != version:
                what = "its weight" if isinstance(tensor, nn.Parameter) else "what it was given"
                raise UsageError(
                    f"{user_line()}: {what} has changed in place since the head was called, before the loss "
                    "has its logits computed. Change a copy (x = x.clone()), or set loss_chunks: off."
                )

    def reduced(
        self, loss: RowFunction, beside: Tensor | None, *, sums: bool, count: Tensor | None = None
    ) -> Tensor:
        """What a loss makes of them, piece by piece."""
        self.refuse_changes()
        self.in_pieces.append(True)
        size = self.head.rows_of_piece(self.x.numel() // self.x.shape[-1])
        trains = self.trains and torch.is_grad_enabled()
        how = ChunkedRows(dtype=self.dtype, each=self.each, loss=loss, sums=sums, size=size, trains=trains)
        with plain_torch(), torch.set_grad_enabled(trains):  # one operation of the script
            return chunked_loss(self.x, self.weight, self.bias, beside, how, count=count)


def _cross_entropy(
    logits: Tensor,
    of: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    function: Callable[..., Tensor] = F.cross_entropy,
) -> Any:
    if size_average is not None or reduce is not None or not (of.channels or logits.dim() == 2):
        return None
    is_index = not target.is_floating_point()
    rows = logits.shape[:1] + logits.shape[2:]
    fits = tuple(target.shape) == tuple(rows if is_index else logits.shape)
    if not fits or target.requires_grad or reduction not in ("mean", "sum", "none"):
        return None  # what the function says to that
    beside = target.reshape(-1) if is_index else target.movedim(1, -1).reshape(-1, logits.shape[1])
    kind = "none" if reduction == "none" else "sum"
    keywords: dict[str, Any] = {"ignore_index": ignore_index, "reduction": kind}
    if label_smoothing:
        keywords["label_smoothing"] = label_smoothing
    if weight is not None:
        keywords["weight"] = weight.clone() if kind == "none" else weight  # a backward needs it, too

    def loss(made: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return function(made, labels, **keywords)

    if kind == "none":
        return of.reduced(loss, beside, sums=False).reshape(rows)
    count = None
    if reduction == "mean":
        count = _counted(beside, weight, ignore_index, dtype=logits.dtype)
    return of.reduced(loss, beside, sums=True, count=count)


def _nll_loss(logits: Tensor, of: Logits, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    if target.is_floating_point():
        return None
    return _cross_entropy(logits, of, target, *args, **kwargs, function=F.nll_loss)


def _counted(labels: Tensor, weight: Tensor | None, ignored: int, *, dtype: torch.dtype) -> Tensor:
    """By how much a mean is divided: over labels that count, or over rows of probabilities."""
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    if labels.is_floating_point():
        return torch.full((), len(labels), dtype=exact, device=labels.device)
    counts = labels != ignored
    if weight is None:
        return counts.sum().to(exact)
    return weight[labels.where(counts, 0)].where(counts, 0).sum()


def _logsumexp(logits: Tensor, of: Logits, dim: Any, keepdim: bool = False) -> Any:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if of.channels or type(dim) is not int or dim % logits.dim() != logits.dim() - 1:
        return None
    found = of.reduced(lambda made, _: made.logsumexp(-1, keepdim=keepdim), None, sums=False)
    return found.reshape((*logits.shape[:-1], *((1,) if keepdim else ())))


def _gather(logits: Tensor, of: Logits, dim: Any, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if of.channels or type(dim) is not int or dim % logits.dim() != logits.dim() - 1 or sparse_grad:
        return None
    if index.shape[:-1] != logits.shape[:-1]:
        return None
    beside = index.reshape(-1, index.shape[-1])

    def taken(made: Tensor, at: Tensor | None) -> Tensor:
        assert at is not None
        return made.gather(-1, at)

    return of.reduced(taken, beside, sums=False).reshape(index.shape)


LOSSES: Mapping[str, Callable[..., Any]] = {
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "logsumexp": _logsumexp,
    "gather": _gather,
}
