"""Logits that nobody has computed yet: a head hands them to a loss, which computes them piece by piece.

::

    head(x) ──► pending: x, weight ──► float, view, [:, :-1] ──► cross_entropy: pieces (see `chunked_loss`)
                     └──► anything else (argmax, print, a sum): the logits, whole, as the head computes them

What is done to rows of logits is done to rows of `x`, and what is done to each row by itself is done to each
piece. So a script may treat them as it likes: numbers and gradients are those of the head.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch._private import (
    FakeTensor,
    backward_in_progress,
    function_transforms_active,
    outside_of_modes,
    saved_tensor_hooks,
)
from shardwright.torch.backward.chunked_loss import ChunkedRows, RowFunction, chunked_loss
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.pytorch.functions import name_of
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import leaves, map_tree

log = logging.getLogger(__name__)

_EACH = frozenset(
    "float double half bfloat16 to type clone contiguous mul multiply __mul__ __rmul__ div divide "
    "true_divide __truediv__ tanh".split()
)
"""Functions that make each number of their result from one of their argument, and give as many."""

_PLACES = frozenset("device get_device is_cpu is_cuda is_meta is_xpu".split())
_SHAPES = frozenset(
    "__len__ _version dim dtype element_size is_complex is_contiguous is_floating_point itemsize layout "
    "names ndim ndimension nelement numel shape size stride".split()
)
_RESHAPE = frozenset("view reshape flatten".split())
_TO_CHANNELS = frozenset("transpose permute movedim moveaxis swapaxes swapdims".split())
_LEAST_BYTES = 2**24


class _Heads:
    """The types of what heads may be given, to leave their logits to a loss just now."""

    may_wait_with: tuple[type, ...] = ()


@contextmanager
def heads_may_wait(*, on_fakes: bool = False) -> Iterator[None]:
    """Has heads that are marked (`mark_heads`) leave their logits to the loss."""
    kind: Any = torch.autograd.Function
    before, original = _Heads.may_wait_with, kind.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(item.__class__ is PendingLogits for item in args):  # past `__torch_function__`
            args = tuple(map(whole_logits, args))
        waiting, _Heads.may_wait_with = _Heads.may_wait_with, ()  # what it makes has a gradient of its own
        try:
            return MethodType(original.__func__, cls)(*args, **kwargs)
        finally:
            _Heads.may_wait_with = waiting

    _Heads.may_wait_with = (Tensor, FakeTensor) if on_fakes else (Tensor,)
    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        _Heads.may_wait_with, kind.apply = before, original


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logits:
    """What logits will be made of.

    Attributes:
        x: (*, H).
        dtype: in which the head computes.
        each: what becomes of them, row by row.
        channels: they have the shape (N, V, *), and not (*, V).
        version: of `source`, what the head was given, at that time.
        trains: gradients are recorded, as they were when the head was called.
    """

    head: "_WaitingForward"
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


class PendingLogits(Tensor):
    """Logits that have a shape and no memory."""

    _of: _Logits
    _whole: Tensor | None
    _has_others: bool

    @staticmethod
    def like(shape: Tensor, of: _Logits) -> "PendingLogits":
        """Logits of the shape and type of a tensor on the meta device."""
        with outside_of_modes():
            made: PendingLogits = torch.Tensor._make_subclass(PendingLogits, shape)
        made._of, made._whole, made._has_others = of, None, False
        return made

    def whole(self) -> Tensor:
        """The logits, computed once."""
        if self._whole is None:
            self._of.head.gave_whole(trains=self._of.trains)
            self._whole = self._of.computed()
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, logits = name_of(func), args[0] if args else None
        if isinstance(logits, PendingLogits) and logits._whole is None:
            if (asked := _asked(logits, func, name, args, kwargs)) is not NotImplemented:
                return asked
            others = [each for each in leaves((args[1:], kwargs)) if isinstance(each, Tensor)]
            if PendingLogits not in map(type, others):
                found = _followed(logits, func, name, args, kwargs)
                if found is not None:
                    return found
            if (name.endswith("_") and not name.startswith("__")) or name == "__setitem__":
                logits._refuse_others(name)
        pending = [each for each in leaves((args, kwargs)) if each.__class__ is PendingLogits]
        args, kwargs = map_tree(whole_logits, (args, kwargs))
        result = func(*args, **kwargs)
        return next((each for each in pending if result is each._whole), result)  # what it was given

    def _refuse_others(self, name: str) -> None:
        """Other names of the same memory would not see a change in place."""
        if self._has_others:
            raise UsageError(
                f"{user_line()}: {name}() changes logits in place, after others were made of them. Change a "
                "copy (logits = logits.clone()), or set loss_chunks: off."
            )


def whole_logits(item: Any) -> Any:
    """Logits that were pending, computed; anything else as it is."""
    return item.whole() if item.__class__ is PendingLogits else item


def _asked(logits: PendingLogits, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The answer to a question for shape, type or place; `NotImplemented` for anything else."""
    if name == "requires_grad" and len(args) == 1:
        return logits._of.trains
    if name in _PLACES:
        return func(logits._of.x, *args[1:], **kwargs)
    if name not in _SHAPES:
        return NotImplemented
    with outside_of_modes():
        return func(*args, **kwargs)


def _followed(
    logits: PendingLogits, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What an operation makes of pending logits; None where it needs them whole."""
    if name in _LOSSES:
        return _LOSSES[name](logits, *args[1:], **kwargs)
    found = None
    if name in _EACH:
        found = _each(logits, func, args[1:], kwargs)
    elif name == "__getitem__":
        found = _picked(logits, args[1])
    elif not logits._of.channels and name in _RESHAPE:
        found = _reshaped(logits, func, args[1:], kwargs)
    elif not logits._of.channels and name in _TO_CHANNELS:
        found = _to_channels(logits, func, args[1:], kwargs)
    elif name == "log_softmax":
        found = _normalised(logits, *args[1:], **kwargs)
    if found is not None:
        logits._has_others = True
    return found


def _shape(logits: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
    with outside_of_modes():
        return func(logits, *args, **kwargs)


def _each(logits: PendingLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Casts and scales, of each number by itself."""
    for item in leaves((args, kwargs)):
        if isinstance(item, Tensor) and (item.dim() or item.requires_grad):
            return None
    place = [item for item in leaves((args, kwargs)) if isinstance(item, torch.device | str)]
    if any(torch.device(item) != logits._of.x.device for item in place if not isinstance(item, torch.dtype)):
        return None
    of = logits._of
    on_meta = map_tree(_to_meta, (args, kwargs))
    shape = _shape(logits, func, *on_meta)
    if shape is logits:  # such a type, or such an order in memory, they have already
        return logits
    if not isinstance(shape, Tensor) or shape.shape != logits.shape:
        return None

    def apply(rows: Tensor) -> Tensor:
        made: Tensor = func(rows, *args, **kwargs)
        return made

    return PendingLogits.like(shape, replace(of, each=(*of.each, apply)))


def _to_meta(item: Any) -> Any:
    if isinstance(item, torch.device):
        return torch.device("meta")
    return item.detach().to("meta") if isinstance(item, Tensor) else item


def _normalised(logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    """Log probabilities are made of each row by itself."""
    of = logits._of
    dim = kwargs.get("dim", args[0] if args else None)
    dtype = kwargs.get("dtype", next((item for item in args[1:] if isinstance(item, torch.dtype)), None))
    if type(dim) is not int or dim % logits.dim() != (1 if of.channels else logits.dim() - 1):
        return None
    shape = _shape(logits, torch.log_softmax, (dim,), {"dtype": dtype})
    return PendingLogits.like(
        shape, replace(of, each=(*of.each, partial(torch.log_softmax, dim=-1, dtype=dtype)))
    )


def _picked(logits: PendingLogits, index: Any) -> Any:
    """Rows by number, by slices, by a mask."""
    of = logits._of
    entries = index if isinstance(index, tuple) else (index,)
    if of.channels or not all(_picks_rows(entry) for entry in entries):
        return None
    rest = sum(entry.dim() if _is_mask(entry) else 1 for entry in entries if entry not in (None, ...))
    num_ellipses = sum(entry is ... for entry in entries)
    if num_ellipses:  # what comes after it counts from the end
        after = entries[next(at for at, entry in enumerate(entries) if entry is ...) + 1 :]
        if after and after[-1] != slice(None):
            return None
        x = of.x[entries]
    elif rest >= logits.dim():
        if entries[-1] != slice(None):
            return None
        x = of.x[entries]
    else:
        x = of.x[entries]
    if any(isinstance(entry, Tensor) for entry in entries):
        with outside_of_modes():
            shape = torch.empty((*x.shape[:-1], logits.shape[-1]), dtype=logits.dtype, device="meta")
    else:
        shape = _shape(logits, Tensor.__getitem__, (index,), {})
    return PendingLogits.like(shape, replace(of, x=x))


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype is torch.bool


def _picks_rows(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return entry.dtype in (torch.bool, torch.int64, torch.int32)
    return entry is None or entry is ... or isinstance(entry, slice) or type(entry) is int


def _reshaped(logits: PendingLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same rows, counted in another way."""
    shape = _shape(logits, func, args, kwargs)
    if shape.dtype is not logits.dtype or not shape.dim() or shape.shape[-1] != logits.shape[-1]:
        return None
    of = logits._of
    return PendingLogits.like(shape, replace(of, x=of.x.reshape(*shape.shape[:-1], of.x.shape[-1])))


def _to_channels(logits: PendingLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Logits (N, *, V) as (N, V, *), in which a loss takes them."""
    sizes = tuple(range(2, 2 + logits.dim()))
    with outside_of_modes():
        places = [size - 2 for size in func(torch.empty(sizes, device="meta"), *args, **kwargs).shape]
    if places != [0, logits.dim() - 1, *range(1, logits.dim() - 1)]:
        return None
    return PendingLogits.like(_shape(logits, func, args, kwargs), replace(logits._of, channels=True))


# ---- what losses make of them ----


def _cross_entropy(
    logits: PendingLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None or not _are_rows(logits):
        return None
    of = logits._of
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
    logits: PendingLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or not _are_rows(logits):
        return None
    rows, beside = logits.shape[:1] + logits.shape[2:], target.reshape(-1)
    if tuple(target.shape) != tuple(rows) or reduction not in ("mean", "sum", "none"):
        return None
    kind = "sum" if reduction != "none" else "none"

    def loss(made: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return F.nll_loss(made, labels, weight=weight, ignore_index=ignore_index, reduction=kind)

    if kind == "none":
        return logits._of.reduced(loss, beside, sums=False).reshape(rows)
    count = _counted(beside, weight, ignore_index, dtype=logits.dtype) if reduction == "mean" else None
    return logits._of.reduced(loss, beside, sums=True, count=count)


def _are_rows(logits: PendingLogits) -> bool:
    """Whether a loss finds classes in the dim of the vocabulary."""
    return logits._of.channels or logits.dim() == 2


def _counted(labels: Tensor, weight: Tensor | None, ignored: int, *, dtype: torch.dtype) -> Tensor:
    """By how much a mean over labels is divided."""
    counts = labels != ignored
    if weight is None:
        return counts.sum().to(torch.float64 if dtype is torch.float64 else torch.float32)
    return weight[labels.where(counts, 0)].where(counts, 0).sum()


def _logsumexp(logits: PendingLogits, dim: Any, keepdim: bool = False) -> Any:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if logits._of.channels or type(dim) is not int or dim % logits.dim() != logits.dim() - 1:
        return None
    found = logits._of.reduced(lambda made, _: made.logsumexp(-1, keepdim=keepdim), None, sums=False)
    return found.reshape(*logits.shape[:-1], *((1,) if keepdim else ()))


def _gather(logits: PendingLogits, dim: Any, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if logits._of.channels or type(dim) is not int or dim % logits.dim() != logits.dim() - 1 or sparse_grad:
        return None
    if index.shape[:-1] != logits.shape[:-1]:
        return None
    beside = index.reshape(-1, index.shape[-1])

    def taken(made: Tensor, at: Tensor | None) -> Tensor:
        assert at is not None
        return made.gather(-1, at)

    return logits._of.reduced(taken, beside, sums=False).reshape(index.shape)


_LOSSES: Mapping[str, Callable[..., Any]] = {
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "logsumexp": _logsumexp,
    "gather": _gather,
}


# ---- heads ----


class _WaitingForward:
    """The forward of a head, in its place.

    Args:
        pieces: of the rows of a microbatch; None: as many as save memory, and take no longer.
    """

    def __init__(self, head: nn.Linear, name: str, pieces: int | None):
        self._head = head
        self._name = name
        self._pieces = pieces
        self._gave_whole: set[bool] = set()  # whether gradients were recorded
        self._told = False

    def __call__(self, x: Tensor) -> Tensor:
        head = self._head
        if torch.compiler.is_dynamo_compiling() or (dtype := self._waits_in(x)) is None:
            return type(head).forward(head, x)
        with outside_of_modes():
            shape = torch.empty((*x.shape[:-1], head.out_features), dtype=dtype, device="meta")
        weight, bias = head.weight, head.bias
        return PendingLogits.like(
            shape,
            _Logits(
                head=self,
                x=x,
                weight=weight,
                bias=bias,
                dtype=dtype,
                source=x,
                version=x._version,
                trains=torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad),
            ),
        )

    def _waits_in(self, x: Tensor) -> torch.dtype | None:
        """The type of logits that wait; None where they are computed now."""
        if type(x) not in _Heads.may_wait_with or x.dim() < 2 or not x.numel():
            return None
        if self._pieces is None and torch.is_grad_enabled() in self._gave_whole:
            return None
        if not self.waits_with(x.numel() // x.shape[-1], x.element_size()):
            return None
        weight = self._head._parameters.get("weight")  # None where it is computed whenever it is asked for
        if weight is None or x.is_inference() or function_transforms_active() or _runs_twice():
            return None
        if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            return torch.get_autocast_dtype(x.device.type)
        return x.dtype if x.dtype is weight.dtype else None

    def waits_with(self, num_rows: int, num_bytes: int) -> bool:
        """Whether it leaves the logits of so many rows to a loss, of numbers of so many bytes."""
        if self._pieces is None and num_rows * self._head.out_features * num_bytes < _LEAST_BYTES:
            return False
        return self.rows_of_piece(num_rows) < num_rows

    def of(self, head: nn.Linear) -> "_WaitingForward":
        """The same for another head."""
        return _WaitingForward(head, self._name, self._pieces)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_WaitingForward":
        return self.of(copy.deepcopy(self._head, memo))

    def __reduce__(self) -> Any:
        """Who loads a module that was pickled whole has a plain head, and need not have this library."""
        return getattr, (self._head, "forward")

    def rows_of_piece(self, num_rows: int) -> int:
        """So many that their logits take half the memory of the weight, whose gradient is kept, too."""
        if self._pieces is not None:
            return -(-num_rows // self._pieces)
        return max(self._head.in_features // 2, 1)

    def gave_whole(self, *, trains: bool) -> None:
        """The script uses logits otherwise than in a loss, too: next time they are computed by the head."""
        self._gave_whole.add(trains)
        if self._pieces is not None and not self._told:
            self._told = True
            log.warning(
                "%s: the logits of %s are used here otherwise than in a loss, so they are computed whole: "
                "loss_chunks saves no memory",
                user_line(),
                self._name or "the model",
            )


def waiting_head(module: nn.Module, num_rows: int) -> "nn.Linear | None":
    """The module, if it is a head that leaves the logits of so many rows to a loss."""
    own = module.__dict__.get("forward")
    if not isinstance(own, _WaitingForward) or not isinstance(module, nn.Linear):
        return None
    return module if own.waits_with(num_rows, module.weight.element_size()) else None


def wait_like(head: nn.Linear, other: nn.Linear) -> None:
    """Marks a head as another one is."""
    own: _WaitingForward = other.__dict__["forward"]
    head.__dict__["forward"] = own.of(head)


def _runs_twice() -> bool:
    """Whether this is a forward that ``torch.utils.checkpoint`` repeats, or repeats just now."""
    hooks = saved_tensor_hooks()
    is_first = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return is_first or backward_in_progress() >= 0


def is_head(module: nn.Module) -> bool:
    """Whether it may leave its logits to a loss; then it keeps nothing that a recomputation would save."""
    return isinstance(module.__dict__.get("forward"), _WaitingForward)


def mark_heads(model: nn.Module, chunks: int | str) -> list[str]:
    """Has the linear layers with the most outputs of all leave their logits to the loss; returns their names.

    Others gain nothing: where logits are no more than what layers keep.
    """
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    most = max((module.out_features for module in linear.values()), default=0)
    found = []
    for name, module in linear.items():
        own = module.__dict__.get("forward")
        is_plain = own is None or getattr(own, "__func__", None) is nn.Linear.forward
        is_plain &= module._parameters.get("weight") is not None
        has_hooks = module._forward_hooks or module._backward_hooks or module._forward_pre_hooks
        if chunks == "off" or module.out_features != most or has_hooks:
            continue
        if is_plain:
            pieces = None if chunks == "auto" else int(chunks)
            module.__dict__["forward"] = _WaitingForward(module, name, pieces)
        if is_plain or isinstance(own, _WaitingForward):
            found.append(name)
    return found
