"""What a trace must not leave behind: stand-ins, and changes of what the model holds.

In a trace units compute on fake tensors. One that a forward puts away for later would be found there by a
real forward. Two guarantees follow::

    the model     attributes of its modules, and what is in the objects, containers, tensors and arrays
                  that they hold, are as before
    the script    stand-ins are taken out of its globals, closures, classes, objects and `lru_cache`;
                  what it counts there, or takes out, is counted and taken out by every run

`trace_guard` puts back the attributes of modules, and this module what these hold. Real tensors stay in
variables of a script: code between units makes them, too. Generators of random numbers are put back wherever
they are, so that the first step draws what a plain loop draws.
"""

import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.torch._private import FakeTensor, storage_key
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.python_state.snapshot import CONTAINERS, NOTHING_INSIDE, Snapshot, entries_of, slots_of
from shardwright.torch.python_state.watched_numbers import WatchedNumber
from shardwright.torch.pytorch.module_tree import OF_EVERY_MODULE
from shardwright.torch.pytorch.script_code import is_script_class
from shardwright.torch.pytorch.tensor_contents import TensorContents, has_content
from shardwright.torch.randomness.python_random import kept_state

__all__ = ["NothingLeftBehind", "is_plain_object"]

_DEPTH = 3
# What is beyond is data. Entries of containers count; of what modules hold, and of the rest.
_LONGEST = 10_000
_MOST = 200_000
_MOST_IN_ARRAYS = 2**26  # bytes
_SKIPPED = (ModuleType, FunctionType, BuiltinFunctionType, MethodType)
# Classes of these keep things that are not the model's: registries, locks, queues.
_NOT_OURS = (
    *("torch.", "builtins.", "typing.", "collections.", "functools.", "asyncio.", "concurrent.", "logging."),
    *("multiprocessing.", "queue.", "threading.", "weakref."),
)
# Classes of these are at work in the trace.
_AT_WORK = ("shardwright.", "smdistributed.")
_LruCache: Any = type(functools.lru_cache(lambda: None))


class NothingLeftBehind:
    """Puts back, at its end, what the model holds, and takes stand-ins out of what the script holds.

    Args:
        model: the whole model.
        functions: the step function, and hooks of modules: what their variables hold.
        objects: others that may be given stand-ins, such as arguments.

    Attributes:
        generators: of random numbers, that were there at the start.
        stand_ins: those that were in the script's variables at the end: ``losses.append(loss.detach())``.
    """

    def __init__(self, model: nn.Module, *functions: Callable[..., Any], objects: Iterable[Any] = ()):
        self._model = model
        self._functions = functions
        self._objects = objects

    def __enter__(self) -> None:
        self._of_model, self._of_script = Snapshot(), Snapshot()
        self._put_back: list[Callable[[], Any]] = []
        self._caches = _lru_caches()
        self._tensors = TensorContents()
        self._memories: set[int] = set()
        self._array_bytes_left = _MOST_IN_ARRAYS
        self._seen: set[int] = set()
        self.generators: list[torch.Generator] = []
        self.stand_ins: list[DeferredTensor] = []
        self._rest: deque[tuple[Any, int, bool]] = deque()
        self._left = {True: _MOST, False: _MOST}
        self._modules = set(self._model.modules())
        self._registered = {storage_key(t) for t in (*self._model.parameters(), *self._model.buffers())}
        for module in self._modules:
            held = [item for key, item in vars(module).items() if key not in OF_EVERY_MODULE]
            self._rest += [(item, _DEPTH, True) for item in held]
        self._look_at_rest()
        self._look_at_script()
        self._look_at_rest()

    def _look_at_script(self) -> None:
        """Looks at classes of the model, at arguments, closures and, last, globals.

        What is in several of them is so looked into deepest.
        """
        kinds = dict.fromkeys(kind for module in self._model.modules() for kind in type(module).__mro__)
        ours = [kind for kind in kinds if not _is_of(kind, (*_NOT_OURS, *_AT_WORK))]
        for kind in ours:
            self._look_into_class(kind, _DEPTH - 1)
        cells = [cell for function in self._functions for cell in _cells_of(function)]
        contents = [item for cell in cells for item in self._of_script.add(cell).values()]
        self._rest += [(item, _DEPTH, False) for item in (*self._objects, *contents)]
        files = dict.fromkeys(kind.__module__ for kind in ours)
        namespaces = [vars(sys.modules[name]) for name in files if name in sys.modules]
        variables = [item for function in self._functions for item in _variables_of(function)]
        # A namespace is not one more step.
        self._rest += [(item, _DEPTH + 1, False) for item in (*variables, *namespaces)]

    def was_there(self, tensor: Tensor) -> bool:
        """Whether a tensor, or one that shares its memory, was in an attribute or a variable at the start.

        Parameters and buffers are not meant.
        """
        memory = storage_key(tensor)
        return memory in self._memories and memory not in self._registered

    def __exit__(self, *exc_info: object) -> None:
        self._of_model.put_back()
        self._of_script.take_out(self._is_left)
        for put_back in self._put_back:
            put_back()
        for cache in self._caches:
            # The garbage collector sees what is in it: results, and tuples and dictionaries of them.
            if any(self._stand_ins_in(item) for item in gc.get_referents(cache)):
                cache.cache_clear()
        too_large = self._tensors.restore()
        if too_large is not None and exc_info[0] is None:
            raise too_large

    def _look_at_rest(self) -> None:
        """Looks at all that is left to be looked at, first at what is near: it is looked into deepest."""
        while self._rest:
            self._look_at(*self._rest.popleft())

    def _look_at(self, item: Any, depth: int, owned: bool) -> None:
        """Takes note of one object, and of what is in it to be looked at.

        Args:
            item: the object.
            depth: how far to look into it.
            owned: the model holds it.
        """
        kind = type(item)  # not isinstance(): a proxy may do things when it is asked for its class
        if kind in NOTHING_INSIDE or id(item) in self._seen:
            return
        if issubclass(kind, type):
            if depth > 0 and not owned and not _is_of(item, _NOT_OURS) and is_script_class(item):
                self._look_into_class(item, depth)
            return
        is_module = issubclass(kind, nn.Module)
        if issubclass(kind, _SKIPPED) or _is_of(kind, _AT_WORK):
            return
        if is_module and (owned or item in self._modules):
            return
        size = len(item) if kind in CONTAINERS else 1
        if size > min(self._left[owned], _LONGEST):
            return
        self._left[owned] -= size
        if self._is_value(item, owned=owned):
            self._seen.add(id(item))
        elif depth > 0:
            self._seen.add(id(item))
            if kind is _LruCache:
                self._caches.append(item)
            elif issubclass(kind, tuple):
                self._rest += [(inner, depth - 1, owned) for inner in item]
            elif kind in CONTAINERS or is_module or _has_entries(item):
                entries = (self._of_model if owned else self._of_script).add(item)
                self._rest += [(inner, depth - 1, owned) for inner in entries.values()]

    def _is_value(self, item: Any, *, owned: bool) -> bool:
        """Takes note of a tensor, an array or a generator; False for anything else."""
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
        elif (put_back := kept_state(item)) is not None:
            self._put_back.append(put_back)
        else:
            return False
        return True

    def _look_into_class(self, kind: type, depth: int) -> None:
        """Takes note of a class of the model or the script, and of what its attributes hold."""
        if len(vars(kind)) <= self._left[False]:
            self._seen.add(id(kind))
            self._left[False] -= len(vars(kind))
            self._rest += [(item, depth, False) for item in self._of_script.add(kind).values()]

    def _is_left(self, item: Any) -> bool:
        """Whether a new item of a variable is a stand-in, or has one inside; takes note of which."""
        found = self._stand_ins_in(item)
        self.stand_ins += [each for each in found if type(each) is DeferredTensor]
        return bool(found)

    def _stand_ins_in(self, item: Any, depth: int = _DEPTH) -> list[Any]:
        """Itself, or those in an object or a container that was not there."""
        kind = type(item)
        if kind in NOTHING_INSIDE:
            return []
        if issubclass(kind, FakeTensor | DeferredTensor | WatchedNumber):
            return [item]
        if depth == 0 or id(item) in self._seen or _is_of(kind, _AT_WORK):
            return []
        if not (kind in CONTAINERS or kind is tuple or _has_entries(item)):
            return []
        entries = entries_of(item)
        if len(entries) > _LONGEST:
            return []
        return [found for inner in entries.values() for found in self._stand_ins_in(inner, depth - 1)]


def _put_array(array: Any, content: Any) -> None:
    if array.shape != content.shape:
        array.resize(content.shape, refcheck=False)
    array[...] = content


def _has_entries(item: Any) -> bool:
    """Whether it is an object of the script's or of a library of models, with attributes or slots."""
    return is_plain_object(item) or (not _is_of(type(item), _NOT_OURS) and bool(slots_of(type(item))))


def _is_of(kind: type, prefixes: tuple[str, ...]) -> bool:
    return f"{kind.__module__}.".startswith(prefixes)


def _variables_of(function: Any) -> list[Any]:
    """The variables of a function's file, the object of a method, and what arguments are by default."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *_variables_of(function.func)]
    names = ("__globals__", "__self__", "__defaults__", "__kwdefaults__")
    found = [getattr(function, name, None) for name in names]
    wrapped = getattr(function, "__wrapped__", None)
    return found if wrapped is None else found + _variables_of(wrapped)


def _cells_of(function: Any, depth: int = _DEPTH) -> list[CellType]:
    """The variables of the functions around a function, and of functions there."""
    if isinstance(function, functools.partial):
        return _cells_of(function.func, depth)
    found = list(getattr(function, "__closure__", None) or ())
    inner = [item for cell in found if depth > 0 for item in entries_of(cell).values()]
    for each in inner:
        if type(each) is FunctionType:
            found += _cells_of(each, depth - 1)
    wrapped = getattr(function, "__wrapped__", None)
    return found if wrapped is None else found + _cells_of(wrapped, depth)


def is_plain_object(item: Any) -> bool:
    """Whether it is an object with attributes, of a class of the user's own or of a library of models."""
    if _is_of(type(item), _NOT_OURS) or not type(item).__dictoffset__:
        return False
    try:
        return type(vars(item)) is dict
    except Exception:
        return False  # a proxy of something that is not there yet


class _Found:
    """All ``lru_cache`` that there were when so many Python modules had been imported."""

    num_modules = 0
    caches: ClassVar[list[weakref.ref[Any]]] = []


def _lru_caches() -> list[Any]:
    """Those that came with Python modules; what is made later is found where the model holds it."""
    if _Found.num_modules != len(sys.modules):
        found = [item for item in gc.get_objects() if type(item) is _LruCache]
        _Found.num_modules, _Found.caches = len(sys.modules), [weakref.ref(item) for item in found]
    return [cache for reference in _Found.caches if (cache := reference()) is not None]
