"""Undoes what a trace must not leave behind: stand-ins, and changes of what the model holds.

In a trace units compute on fake tensors. One that a forward puts away for later would be found there by a
real forward. Two guarantees follow::

    the model     attributes of its modules, and what is in the objects, containers, tensors and arrays
                  that they hold, are as before
    the script    stand-ins are taken out of its globals, closures, classes, objects and `lru_cache`;
                  what it counts there, or takes out, is counted and taken out by every run

Real tensors stay in variables of a script: code between units makes them, too. Generators of random numbers
are put back wherever they are, so that the first step draws what a plain loop draws.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.torch._private.tensors import FakeTensor, storage_key
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.python_state.snapshot import DICTIONARIES, Snapshot, is_of_a_library, walk
from shardwright.torch.python_state.watched_numbers import WatchedNumber
from shardwright.torch.pytorch.modules import OF_EVERY_MODULE, is_script_class
from shardwright.torch.pytorch.tensors import TensorContents, has_content
from shardwright.torch.pytorch.tree import Slot, entries_of
from shardwright.torch.randomness import kept_state

_STEPS = 3  # from an object to those that it holds
_MOST = 200_000  # entries of what modules hold, and of the rest
_MOST_IN_ARRAYS = 2**26  # bytes
_STAND_INS = (FakeTensor, DeferredTensor, WatchedNumber)
_LruCache: Any = type(functools.lru_cache(lambda: None))


class NothingLeftBehind:
    """Puts back, at its end, what the model holds, and takes stand-ins out of what the script holds.

    Attributes:
        stand_ins: those that were in the script's variables at the end: ``losses.append(loss.detach())``.
    """

    def __init__(self, model: nn.Module, *functions: Callable[..., Any], objects: Iterable[Any] = ()):
        self._model = model
        self._functions = functions
        self._objects = objects

    def __enter__(self) -> None:
        self.of_model, self._of_script = Snapshot(), Snapshot()
        self._put_back: list[Callable[[], Any]] = []
        self._caches = [(cache, cache.cache_info().misses) for cache in _lru_caches()]
        self._tensors = TensorContents()
        self._memories: set[int] = set()
        self._array_bytes_left = _MOST_IN_ARRAYS
        self.generators: list[torch.Generator] = []
        self.stand_ins: list[DeferredTensor] = []
        self._registered = {storage_key(t) for t in (*self._model.parameters(), *self._model.buffers())}
        self._registries: set[int] = set()  # of parameters, modules and hooks
        self._seen = {id(module) for module in self._model.modules()}
        self._look_at_model()
        self._look_at_script()

    def _look_at_model(self) -> None:
        held: dict[int, Any] = {}
        for module in self._model.modules():
            for key, item in self.of_model.add(module).items():
                if key not in OF_EVERY_MODULE:
                    held[id(item)] = item
                elif isinstance(item, dict | set):
                    self.of_model.add(item)
                    self._registries.add(id(item))
        for item, inside in walk([(i, _STEPS) for i in held.values()], most=_MOST, skips=self._is_seen):
            self._seen.add(id(item))
            # One that a module holds itself may be of any length.
            is_container = id(item) in held and issubclass(type(item), dict | list | set)
            if not is_container and inside is None:
                self._look_at_value(item, owned=True)
            elif not isinstance(item, tuple):
                self.of_model.add(item)
                if type(item) in (list, dict):
                    self.of_model.follow_size(item)

    def _look_at_script(self) -> None:
        """Looks at classes of the model, at arguments, at what functions hold, and at files of the model."""
        kinds = dict.fromkeys(kind for module in self._model.modules() for kind in type(module).__mro__)
        ours = dict.fromkeys(kind for kind in kinds if not is_of_a_library(kind))
        files = dict.fromkeys(kind.__module__ for kind in ours)
        variables = [item for function in self._functions for item in _variables_of(function)]
        variables += [vars(sys.modules[name]) for name in files if name in sys.modules]
        roots = [(item, _STEPS) for item in (*ours, *self._objects)]
        roots += [(item, _STEPS + 1) for item in variables]  # a namespace is not one more step
        for item, entries in walk(
            roots,
            most=_MOST,
            skips=self._is_seen,
            enters=lambda kind: kind in ours or (not is_of_a_library(kind) and is_script_class(kind)),
        ):
            self._seen.add(id(item))
            if entries is None:
                self._look_at_value(item, owned=False)
            elif not isinstance(item, tuple):
                self._of_script.add(item)

    def _is_seen(self, item: Any) -> bool:
        return id(item) in self._seen

    def was_there(self, tensor: Tensor) -> bool:
        """Whether a tensor, or one that shares its memory, was in an attribute or a variable at the start."""
        memory = storage_key(tensor)
        return memory in self._memories and memory not in self._registered

    @property
    def changed(self) -> list[Slot]:
        """The attributes of modules and of objects, and the entries of dictionaries, that have changed."""
        return [
            (holder, key)
            for holder, key in self.of_model.changed
            if id(holder) not in self._registries
            and (type(holder) in DICTIONARIES or type(getattr(holder, "__dict__", None)) is dict)
            and not (isinstance(holder, nn.Module) and key in OF_EVERY_MODULE)
        ]

    def __exit__(self, *exc_info: object) -> None:
        self.of_model.put_back()
        self._of_script.take_out(self._is_left)
        for put_back in self._put_back:
            put_back()
        for cache, misses in self._caches:
            # The garbage collector sees what is in it: results, and tuples and dictionaries of them.
            if cache.cache_info().misses != misses and self._stand_ins_in(*gc.get_referents(cache)):
                cache.cache_clear()
        too_large = self._tensors.restore()
        if too_large is not None and exc_info[0] is None:
            raise too_large

    def _look_at_value(self, item: Any, *, owned: bool) -> None:
        """Takes note of a tensor, an array, a generator or a cache."""
        kind = type(item)
        if issubclass(kind, Tensor):
            if has_content(item):
                self._memories.add(storage_key(item))
                if owned:
                    self._tensors.keep(item)
        elif issubclass(kind, torch.Generator):
            self.generators.append(item)
        elif kind is np.ndarray:
            if owned and item.nbytes <= self._array_bytes_left and item.flags.writeable:
                self._array_bytes_left -= item.nbytes
                self._put_back.append(functools.partial(_put_array, item, item.copy()))
        elif kind is _LruCache:
            self._caches.append((item, item.cache_info().misses))
        elif (put_back := kept_state(item)) is not None:
            self._put_back.append(put_back)

    def _is_left(self, item: Any) -> bool:
        """Whether a new item of a variable is a stand-in, or has one inside; takes note of which."""
        found = self._stand_ins_in(item)
        self.stand_ins += [each for each in found if type(each) is DeferredTensor]
        return bool(found)

    def _stand_ins_in(self, *items: Any) -> list[Any]:
        """Themselves, or those in objects and containers that were not there."""
        found = walk([(item, _STEPS) for item in items], skips=self._is_seen)
        return [each for each, _ in found if issubclass(type(each), _STAND_INS)]


def _put_array(array: Any, content: Any) -> None:
    if array.shape != content.shape:
        array.resize(content.shape, refcheck=False)
    array[...] = content


def _variables_of(function: Any, steps: int = _STEPS) -> Iterator[Any]:
    """The holders of a function's variables: cells of those around it, its file, its object, defaults."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _variables_of(function.func, steps)
        return
    for cell in getattr(function, "__closure__", None) or ():
        yield cell
        for item in entries_of(cell).values() if steps > 0 else ():
            if type(item) is FunctionType:
                yield from _variables_of(item, steps - 1)
    if steps == _STEPS:
        for name in ("__globals__", "__self__", "__defaults__", "__kwdefaults__"):
            yield getattr(function, name, None)
    if hasattr(function, "__wrapped__"):
        yield from _variables_of(function.__wrapped__, steps)


class _Found:
    """All ``lru_cache`` that there were when so many Python modules had been imported."""

    num_modules = 0
    caches: ClassVar[list[weakref.ref[Any]]] = []


def _lru_caches() -> list[Any]:
    """The ``lru_cache`` that came with Python modules; later ones are found where the model holds them."""
    if _Found.num_modules != len(sys.modules):
        found = [item for item in gc.get_referrers(_LruCache) if type(item) is _LruCache]
        _Found.num_modules, _Found.caches = len(sys.modules), [weakref.ref(item) for item in found]
    return [cache for reference in _Found.caches if (cache := reference()) is not None]
