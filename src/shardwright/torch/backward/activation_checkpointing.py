"""Recomputes activations: drops a module's after its forward, computes them again in the backward."""

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.errors import UsageError
from shardwright.torch._private.modules import transforms_beside_hooks
from shardwright.torch.backward.pending_logits import PendingLogits, whole_logits
from shardwright.torch.backward.waiting_heads import no_head_waits, waits_for_loss
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.interception.unit_attributes import TakesFound, called_with_hidden, has_hidden
from shardwright.torch.pytorch.modules import forward_hooks_put
from shardwright.torch.pytorch.tree import flatten, leaves
from shardwright.torch.randomness import PythonState, get_python_state, set_python_state

log = logging.getLogger(__name__)

_MARK = "_shardwright_recomputation"


class _Recomputed(TakesFound):
    """The class of a module whose activations are recomputed has it as its last base (see `UnitCall`)."""


def _recomputed_class(user_class: Any) -> type:
    """A class like the user's, of which calls are recomputed."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = partial(user_class.__call__, self)
        if has_hidden(kwargs):  # in the backward, too
            own = partial(called_with_hidden, self, own)
        preserve = vars(self)[_MARK]
        if preserve is None:
            return own(*args, **kwargs)
        hooks, pre_hooks = self._forward_hooks, self._forward_pre_hooks

        def called(*args: Any, **kwargs: Any) -> Any:
            # A unit is called without hooks, which have run around it: so it must be in the backward.
            with forward_hooks_put(self, hooks, pre_hooks):
                return own(*args, **kwargs)

        return call_recomputed(self, called, args, kwargs, preserve_rng_state=preserve)

    names = {"__module__": user_class.__module__, "__qualname__": user_class.__qualname__}
    return type(user_class.__name__, (user_class, _Recomputed), {**names, "__call__": call})


_CLASSES: dict[type, type] = {}


def set_activation_checkpointing(
    module: nn.Module,
    *,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Recomputes the activations of a module in the backward, instead of keeping them.

    Call it before the first step. A module that is spread over stages is recomputed unit by unit.

    Args:
        module: any module of the model. For an `nn.Sequential`, its children are.
        preserve_rng_state: draw the same random numbers again (dropout); False is faster where nothing is
            drawn.
        pack_args_as_tuple: accepted for scripts written for other libraries; arguments are passed as they
            come.
        strategy: for `nn.Sequential`; ``"contiguous"`` and ``"group_N"`` are accepted for scripts written for
            other libraries, with a warning. Children are recomputed one by one, like ``"each"``.

    Raises:
        UsageError: the strategy is unknown, or the module is not one.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> sw.set_activation_checkpointing(model, strategy="each")
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"set_activation_checkpointing takes an nn.Module, not a {type(module).__name__}.")
    _check_strategy(strategy)
    if not isinstance(module, nn.Sequential):
        if strategy != "each":
            raise UsageError(
                f"strategy {strategy!r} is for nn.Sequential, but this is a {type(module).__name__}."
            )
        mark_recomputed(module, preserve_rng_state=preserve_rng_state)
        return
    if strategy != "each":
        warnings.warn(f"strategy {strategy!r} recomputes the children one by one, like 'each'.", stacklevel=2)
    for child in module:
        # An activation by itself keeps no less when recomputed, and may work in place on its input.
        if next(child.parameters(), None) is not None:
            mark_recomputed(child, preserve_rng_state=preserve_rng_state)


def is_marked(module: nn.Module) -> bool:
    """Whether the activations of a module are recomputed on the user's wish."""
    return vars(module).get(_MARK) is not None


def marked_inside(model: nn.Module, unit_ids: set[int]) -> set[int]:
    """Units to recompute because a module around them is marked; that module's own mark is taken off."""
    found: set[int] = set()
    for module in model.modules():
        if id(module) in unit_ids or not is_marked(module):
            continue
        inside = [sub for sub in module.modules() if id(sub) in unit_ids]
        if inside:
            vars(module)[_MARK] = None
            found.update(id(sub) for sub in inside)
    return found


def call_recomputed(
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool = True,
) -> Any:
    if waits_for_loss(module, args):
        return call(*args, **kwargs)
    args, kwargs = _without_caches(args, kwargs)
    counter = CostCounter.active()
    if counter is not None:
        with counter.keeping_only([leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]):
            return call(*args, **kwargs)
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        before = _Before(module, draws=preserve_rng_state)
        return before, _AsBefore(module, before)

    def called(*args: Any, **kwargs: Any) -> Any:
        with transforms_beside_hooks(), no_head_waits():  # what they save is kept
            return call(*args, **kwargs)

    return checkpoint(
        called,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        context_fn=contexts,
        **kwargs,
    )


_BufferPlace = tuple[nn.Module, str]

# Buffers that forwards have changed so far; a module that is not here has had none yet.
_CHANGED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
_SMALL_BYTES = 2**16


def _buffers_of(module: nn.Module) -> Iterator[tuple[_BufferPlace, Tensor]]:
    for sub in module.modules():
        for key, buffer in sub._buffers.items():
            if buffer is not None:
                yield (sub, key), buffer


class _Before:
    """Keeps what a first forward finds in the buffers that it changes, and what it draws from.

    Attributes:
        generators: of Python and NumPy, whose numbers torch.utils.checkpoint does not draw again; None where
            nothing is drawn.
    """

    def __init__(self, module: nn.Module, *, draws: bool):
        self._module = module
        self._draws = draws
        self.content: dict[_BufferPlace, Tensor] = {}
        self.generators: PythonState | None = None

    def __enter__(self) -> None:
        self.generators = get_python_state() if self._draws else None
        self._before = [(place, buffer, _version(buffer)) for place, buffer in _buffers_of(self._module)]
        for (module, key), buffer, _ in self._before:
            # A copy of a large table that nothing changes would take time in every forward.
            changed = _CHANGED.get(module)
            if changed is None or key in changed or buffer.nbytes <= _SMALL_BYTES:
                self.content[module, key] = buffer.clone()

    def __exit__(self, *exc_info: object) -> None:
        now = dict(_buffers_of(self._module))
        for place, buffer, version in self._before:
            module, key = place
            changed = _CHANGED.setdefault(module, set())
            if now.get(place) is buffer and _version(buffer) == version:
                self.content.pop(place, None)
                continue
            changed.add(key)
            if place not in self.content:
                log.warning(
                    "the buffer %s of a %s is changed for the first time by a forward that is recomputed: "
                    "this one time its backward finds the changed one",
                    key,
                    type(module).__name__,
                )
        self._before.clear()


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


class _AsBefore:
    """Gives a second forward the buffers and random numbers of the first; takes back what it does to them.

    Running statistics count a batch once. What the forward reads before it changes it (the estimate of a
    spectral norm) is what the first one read. Entered once for each backward that goes through the module:
    one that is part of its forward (`torch.autograd.grad`), and the last.
    """

    def __init__(self, module: nn.Module, before: _Before):
        self._module = module
        self._before = before
        self._kept: list[list[tuple[_BufferPlace, Tensor]]] = []
        self._generators: list[PythonState] = []

    def __enter__(self) -> None:
        if self._before.generators is not None:
            self._generators.append(get_python_state())
            set_python_state(self._before.generators)
        kept = list(_buffers_of(self._module))
        self._kept.append(kept)
        for place, buffer in kept:
            module, key = place
            module._buffers[key] = self._before.content.get(place, buffer).clone()

    def __exit__(self, *exc_info: object) -> None:
        for (module, key), buffer in self._kept.pop():
            module._buffers[key] = buffer
        if self._before.generators is not None:
            set_python_state(self._generators.pop())


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drops key-value caches: a second forward would fill them twice, and training does not read them.

    Logits that wait are computed here, and not inside, where a second forward would find them computed.
    """
    items, structure = flatten((args, kwargs))
    if not any(_is_cache(item) or item.__class__ is PendingLogits for item in items):
        return args, kwargs
    args, kwargs = structure.rebuild([None if _is_cache(item) else whole_logits(item) for item in items])
    return args, kwargs


def _is_cache(item: Any) -> bool:
    return callable(getattr(item, "update", None)) and callable(getattr(item, "get_seq_length", None))


def mark_recomputed(module: nn.Module, *, preserve_rng_state: bool = True) -> None:
    vars(module)[_MARK] = preserve_rng_state
    user_class = type(module)
    if issubclass(user_class, _Recomputed):
        return
    if user_class not in _CLASSES:
        _CLASSES[user_class] = _recomputed_class(user_class)
    module.__class__ = _CLASSES[user_class]


def _check_strategy(strategy: str) -> None:
    prefix, _, number = strategy.partition("_")
    is_group = prefix == "group" and number.isdigit() and int(number) > 0
    if strategy not in ("each", "contiguous") and not is_group:
        raise UsageError(
            f"strategy {strategy!r} is unknown. Use each, contiguous, or group_N such as group_2."
        )
