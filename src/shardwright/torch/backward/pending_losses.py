"""What losses make of logits that nobody has computed yet, piece by piece: see `pending_logits`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

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
        dtype: in which the head computes.
        each: what becomes of them, row by row.
        channels: they have the shape (N, V, *), and not (*, V).
        version: of `source`, what the head was given, at that time.
        trains: gradients are recorded, as they were when the head was called.
    """

    head: Head
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    each: tuple[Callable[[Tensor], Tensor], ...] = ()
    channels: bool = False
    source: Tensor
    version: int
    trains: bool

    def computed(self) -> Tensor:
        """The logits, whole."""
        self.refuse_changes()
        kind = self.x.device.type
        with plain_torch(), torch.autocast(kind, enabled=False), torch.set_grad_enabled(self.trains):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            made = F.linear(self.x.to(self.dtype), self.weight.to(self.dtype), bias)
            for each in self.each:
                made = each(made)
            return made.movedim(-1, 1) if self.channels else made

    def refuse_changes(self) -> None:
        if self.version != self.source._version:
            raise UsageError(
                f"{user_line()}: what the head was given has changed in place before the loss has the logits "
                "computed. Change a copy (x = x.clone()), or set loss_chunks: off."
            )

    def reduced(
        self, loss: RowFunction, beside: Tensor | None, *, sums: bool, count: Tensor | None = None
    ) -> Tensor:
        """What a loss makes of them, piece by piece."""
        self.refuse_changes()
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
) -> Any:
    if size_average is not None or reduce is not None or not _are_rows(logits, of):
        return None
    is_index = not target.is_floating_point()
    rows = logits.shape[:1] + logits.shape[2:]
    if tuple(target.shape) != tuple(rows if is_index else logits.shape) or target.requires_grad:
        return None  # what cross_entropy says to that
    beside = target.reshape(-1) if is_index else target.movedim(1, -1).reshape(-1, logits.shape[1])
    kind = "sum" if reduction != "none" else "none"
    keywords = {"weight": weight, "reduction": kind, "label_smoothing": label_smoothing}

    def loss(made: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(made, labels, ignore_index=ignore_index, **keywords)  # type: ignore[arg-type]

    if kind == "none":
        return of.reduced(loss, beside, sums=False).reshape(rows)
    count = None
    if reduction == "mean":
        count = _counted(beside, weight, ignore_index, dtype=logits.dtype) if is_index else None
        if count is None:
            count = torch.tensor(float(len(beside)), device=beside.device, dtype=logits.dtype)
    elif reduction != "sum":
        return None
    return of.reduced(loss, beside, sums=True, count=count)


def _nll_loss(
    logits: Tensor,
    of: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or not _are_rows(logits, of):
        return None
    rows, beside = logits.shape[:1] + logits.shape[2:], target.reshape(-1)
    if tuple(target.shape) != tuple(rows) or reduction not in ("mean", "sum", "none"):
        return None
    kind = "sum" if reduction != "none" else "none"

    def loss(made: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return F.nll_loss(made, labels, weight=weight, ignore_index=ignore_index, reduction=kind)

    if kind == "none":
        return of.reduced(loss, beside, sums=False).reshape(rows)
    count = _counted(beside, weight, ignore_index, dtype=logits.dtype) if reduction == "mean" else None
    return of.reduced(loss, beside, sums=True, count=count)


def _are_rows(logits: Tensor, of: Logits) -> bool:
    """Whether a loss finds classes in the dim of the vocabulary."""
    return of.channels or logits.dim() == 2


def _counted(labels: Tensor, weight: Tensor | None, ignored: int, *, dtype: torch.dtype) -> Tensor:
    """By how much a mean over labels is divided."""
    counts = labels != ignored
    if weight is None:
        return counts.sum().to(torch.float64 if dtype is torch.float64 else torch.float32)
    return weight[labels.where(counts, 0)].where(counts, 0).sum()


def _logsumexp(logits: Tensor, of: Logits, dim: Any, keepdim: bool = False) -> Any:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if of.channels or type(dim) is not int or dim % logits.dim() != logits.dim() - 1:
        return None
    found = of.reduced(lambda made, _: made.logsumexp(-1, keepdim=keepdim), None, sums=False)
    return found.reshape(*logits.shape[:-1], *((1,) if keepdim else ()))


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
