"""Logits that nobody has computed yet: a head hands them to a loss, which computes them piece by piece.

::

    head(x) ──► pending: x, weight ──► float, view, [:, :-1] ──► cross_entropy: pieces (see `chunked_loss`)
                     └──► anything else (argmax, print, a sum): the logits, whole, as the head computes them

What is done to rows of logits is done to rows of `x`, and what is done to each row by itself is done to each
piece. So a script may treat them as it likes: numbers and gradients are those of the head.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch._private import outside_of_modes
from shardwright.torch.backward.pending_losses import LOSSES, Logits
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


class PendingLogits(Tensor):
    """Logits that have a shape and no memory."""

    _of: Logits
    _whole: Tensor | None
    _has_others: bool

    @staticmethod
    def like(shape: Tensor, of: Logits) -> "PendingLogits":
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
    if name in LOSSES:
        return LOSSES[name](logits, logits._of, *args[1:], **kwargs)
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
