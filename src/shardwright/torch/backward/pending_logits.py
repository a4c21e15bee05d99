"""Logits that nobody has computed yet: a head hands them to a loss, which computes them piece by piece.

::

    head(x) ──► pending: x, weight ──► float, view, [:, :-1] ──► cross_entropy: pieces (see `chunked_loss`)
                     └──► anything else (argmax, print, a sum): the logits, whole, as the head computes them

What is done to rows of logits is done to rows of `x`, and what is done to each row by itself is done to each
piece. So a script may treat them as it likes: numbers and gradients are those of the head.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch._private.tensors import outside_of_modes
from shardwright.torch.backward.pending_losses import LOSSES, Logits
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.pytorch.functions import name_of
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import leaves, map_tree

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

_OF_GRADIENT = frozenset("grad register_hook retain_grad register_post_accumulate_grad_hook".split())


class PendingLogits(Tensor):
    """Logits that have a shape and no memory."""

    _of: Logits
    _view: Callable[[], Tensor] | None
    _whole: Tensor | None

    @staticmethod
    def like(shape: Tensor, of: Logits, view: Callable[[], Tensor] | None = None) -> "PendingLogits":
        """Logits of the shape and type of a tensor on the meta device; a view shares the memory of others."""
        with outside_of_modes():
            made: PendingLogits = torch.Tensor._make_subclass(PendingLogits, shape, of.trains)
            if of.trains:
                made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        made._of, made._view, made._whole = of, view, None
        return made

    def whole(self) -> Tensor:
        """The logits, computed once."""
        if self._whole is None:
            of = self._of
            of.head.gave_whole(trains=of.trains)
            of.are_whole.append(True)
            with plain_torch(), torch.inference_mode(False), torch.set_grad_enabled(of.trains):
                self._whole = of.computed() if self._view is None else self._view()
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        logits: Any = args[0] if args else None
        if name == "grad" and len(args) == 1:  # the attribute
            own = logits._whole
            return own.grad if own is not None and own.retains_grad else None
        is_pending = isinstance(logits, PendingLogits) and logits._whole is None
        if is_pending and (asked := _asked(logits, func, name, args, kwargs)) is not NotImplemented:
            return asked
        pending = [each for each in leaves((args, kwargs)) if each.__class__ is PendingLogits]
        if is_pending and len(pending) == 1 and not logits._of.are_whole:
            found = _followed(logits, func, name, args, kwargs)
            if found is not None:
                return found
        for each in pending:
            each._refuse_late_gradient(name)
        args, kwargs = map_tree(whole_logits, (args, kwargs))
        result = func(*args, **kwargs)
        return next((each for each in pending if result is each._whole), result)  # what it was given

    def _refuse_late_gradient(self, name: str) -> None:
        if self._whole is None and self._of.in_pieces and name in _OF_GRADIENT:
            raise UsageError(
                f"{user_line()}: {name}() wants the gradient of logits, and their loss was computed piece by "
                "piece, without any. Ask for it before the loss, or set loss_chunks: off."
            )


def _refuse_gradient(_: Tensor) -> None:
    raise UsageError(
        "logits went past Python (torch.vmap, a scripted function, C++ code) before they were computed, so "
        "their gradient would be lost: set loss_chunks: off."
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
    of = logits._of
    if "out" in kwargs or not of.x.numel():
        return None
    if name in LOSSES:
        return LOSSES[name](logits, of, *args[1:], **kwargs)
    if name in _EACH:
        return _each(logits, func, args[1:], kwargs)
    if name == "log_softmax":
        return _normalised(logits, *args[1:], **kwargs)
    if of.channels:
        return None
    if name == "__getitem__":
        return _picked(logits, args[1])
    if name in _RESHAPE:
        return _reshaped(logits, func, args[1:], kwargs)
    return _to_channels(logits, func, args[1:], kwargs) if name in _TO_CHANNELS else None


def _made(
    shape: Tensor, of: Logits, view: Callable[[], Tensor] | None = None, **changes: Any
) -> PendingLogits:
    """Logits that follow from others; those that are no view have a memory of their own."""
    if view is None:
        changes["are_whole"] = []
    trains = of.trains and torch.is_grad_enabled()
    return PendingLogits.like(shape, replace(of, trains=trains, **changes), view)


def _view_of(logits: PendingLogits, func: Any, args: Any, kwargs: Any) -> Callable[[], Tensor]:
    def view() -> Tensor:
        made: Tensor = func(logits.whole(), *args, **kwargs)
        return made

    return view


def _shape(logits: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
    with outside_of_modes():
        return func(logits, *args, **kwargs)


def _each(logits: PendingLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Casts and scales, of each number by itself."""
    of = logits._of
    for item in leaves((args, kwargs)):
        if isinstance(item, Tensor) and (item.dim() or item.requires_grad):
            return None
        is_device = isinstance(item, torch.device | str) or (name_of(func) == "to" and type(item) is int)
        if is_device and (name_of(func) != "to" or torch.device(item) != of.x.device):
            return None
    on_meta = map_tree(_to_meta, (args, kwargs))
    shape = _shape(logits, func, *on_meta)
    if shape is logits:  # such a type, or such an order in memory, they have already
        return logits
    if not isinstance(shape, Tensor) or shape.shape != logits.shape:
        return None
    # As they are now: the script may change a scale before the loss.
    args, kwargs = map_tree(_as_it_is, (args, kwargs))

    def apply(rows: Tensor) -> Tensor:
        made: Tensor = func(rows, *args, **kwargs)
        return made

    return _made(shape, of, each=(*of.each, apply))


def _as_it_is(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item


def _to_meta(item: Any) -> Any:
    if isinstance(item, torch.device | str):
        return torch.device("meta")
    return item.detach().to("meta") if isinstance(item, Tensor) else item


def _normalised(logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    """Log probabilities are made of each row by itself."""
    of = logits._of
    dim = kwargs.get("dim", args[0] if args else None)
    dtype = kwargs.get("dtype", next((item for item in args[1:] if isinstance(item, torch.dtype)), None))
    if type(dim) is not int or dim % logits.dim() != (1 if of.channels else logits.dim() - 1):
        return None
    if dtype is None:  # autocast may have them in another type
        dtype = torch.empty(0, 1, dtype=logits.dtype, device=of.x.device).log_softmax(-1).dtype
    shape = _shape(logits, torch.log_softmax, (dim,), {"dtype": dtype})
    return _made(shape, of, each=(*of.each, partial(torch.log_softmax, dim=-1, dtype=dtype)))


def _picked(logits: PendingLogits, index: Any) -> Any:
    """Rows by number, by slices, by a mask."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(_picks_rows(entry) for entry in entries):
        return None
    dims = sum(entry.dim() if _is_mask(entry) else 1 for entry in entries if not _takes_no_dim(entry))
    counts_from_end = any(entry is ... for entry in entries) and entries[-1] is not ...
    if (counts_from_end or dims >= logits.dim()) and not _is_all(entries[-1]):
        return None  # it takes some of the words
    x = logits._of.x[entries]
    if any(isinstance(entry, Tensor) for entry in entries):
        with outside_of_modes():
            shape = torch.empty((*x.shape[:-1], logits.shape[-1]), dtype=logits.dtype, device="meta")
    else:
        shape = _shape(logits, Tensor.__getitem__, (index,), {})
    return _made(shape, logits._of, _view_of(logits, Tensor.__getitem__, (index,), {}), x=x)


def _takes_no_dim(entry: Any) -> bool:
    return entry is None or entry is ...


def _is_all(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


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
    x = logits._of.x
    view = _view_of(logits, func, args, kwargs)
    return _made(shape, logits._of, view, x=x.reshape(*shape.shape[:-1], x.shape[-1]))


def _to_channels(logits: PendingLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Logits (N, *, V) as (N, V, *), in which a loss takes them."""
    sizes = tuple(range(2, 2 + logits.dim()))
    with outside_of_modes():
        places = [size - 2 for size in func(torch.empty(sizes, device="meta"), *args, **kwargs).shape]
    if places != [0, logits.dim() - 1, *range(1, logits.dim() - 1)]:
        return None
    view = _view_of(logits, func, args, kwargs)
    return _made(_shape(logits, func, args, kwargs), logits._of, view, channels=True)
