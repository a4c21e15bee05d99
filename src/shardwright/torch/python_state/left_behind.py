"""What a trace must not leave behind: fake tensors, and what forwards changed.

In a trace units compute on fake tensors. One that a forward puts away for later would be found there by a
real forward. `trace_guard` puts back the attributes of modules. Here the objects that these hold get back
what they had, and tensors that were changed in place their content, also small ones in variables; counts in
variables and classes, the model's and the script's, are put back, and fake tensors and stand-ins of the
trace taken out of globals, classes and ``lru_cache``. Real tensors may stay there: code between units makes
them, too.
"""

import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.torch._private import FakeTensor, storage_key
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.python_state.variable_content import (
    CONTAINERS,
    PLAIN,
    content_of_variable,
    is_plain,
    items_of,
    put_all_back,
    put_plain_back,
    put_slots_back,
    slots_of,
)
from shardwright.torch.python_state.watched_numbers import WatchedNumber
from shardwright.torch.python_state.written_elsewhere import names_written_elsewhere
from shardwright.torch.pytorch.module_tree import OF_EVERY_MODULE
from shardwright.torch.pytorch.script_code import is_script_class
from shardwright.torch.pytorch.tensor_contents import TensorContents
from shardwright.torch.randomness.python_random import kept_state

__all__ = ["NothingLeftBehind", "is_plain_object"]

_DEPTH = 3
# What is beyond is data. Entries of containers count; of what modules hold, and of the rest.
_LONGEST = 10_000
_MOST = 200_000
_LARGEST_SHARED = 2**20  # bytes of a tensor in a variable of a script: a count, a sum, but no data set
_MOST_IN_ARRAYS = 2**26  # bytes
_SKIPPED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
# Classes of these keep things that are not the model's: registries, locks, queues.
_NOT_OURS = (
    *("torch.", "builtins.", "typing.", "collections.", "functools.", "asyncio.", "concurrent.", "logging."),
    *("multiprocessing.", "queue.", "threading.", "weakref."),
)
# Classes of these are at work in the trace.
_AT_WORK = ("shardwright.", "smdistributed.")
_LruCache: Any = type(functools.lru_cache(lambda: None))


class NothingLeftBehind:
    """Puts things back at its end as they were at its start.

    Args:
        model: the whole model.
        functions: the step function, and hooks of modules: what their variables hold.
        objects: others that may be changed, such as arguments.

    Attributes:
        generators: of random numbers, that were there at the start.
        stand_ins: new ones of values that were in variables at the end: ``losses.append(loss.detach())``.
    """

    def __init__(self, model: nn.Module, *functions: Callable[..., Any], objects: Iterable[Any] = ()):
        self._model = model
        self._functions = functions
        self._objects = objects

    def __enter__(self) -> None:
        self._owned: list[tuple[Any, Any]] = []
        self._shared: list[tuple[Any, Any]] = []
        self._slotted: list[tuple[Any, dict[Any, Any]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._random_states: list[Callable[[], Any]] = []
        self._array_bytes_left = _MOST_IN_ARRAYS
        self._elsewhere = names_written_elsewhere()
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._caches = [(cache, cache.cache_info().misses) for cache in _lru_caches()]
        self._tensors = TensorContents()
        self._seen: set[int] = set()
        self.generators: list[torch.Generator] = []
        self.stand_ins: list[DeferredTensor] = []
        self._rest: deque[tuple[Any, int, bool]] = deque()
        self._left = {True: _MOST, False: _MOST}
        self._modules = set(self._model.modules())
        self._registered = {storage_key(t) for t in (*self._model.parameters(), *self._model.buffers())}
        for module in self._model.modules():
            for key, item in list(vars(module).items()):
                if key not in OF_EVERY_MODULE:
                    self._look_into(item, _DEPTH, owned=True)
        self._look_at_rest()
        files: dict[str, None] = {}
        for kind in dict.fromkeys(kind for module in self._model.modules() for kind in type(module).__mro__):
            if not _is_of(kind, (*_NOT_OURS, *_AT_WORK)):
                self._look_into_class(kind, _DEPTH - 1)
                files[kind.__module__] = None
        named = [pair for function in self._functions for pair in _cells_of(function) if _has(pair[1])]
        ours = [cell for name, cell in named if name not in self._elsewhere]
        self._cells = [(cell, cell.cell_contents) for cell in ours]
        variables = [item for function in self._functions for item in _variables_of(function)]
        # Globals last: what is in a cell, too, is looked into less deeply there.
        for item in (*self._objects, *(content for _, content in self._cells)):
            self._look_into(item, _DEPTH, owned=False)
        for item in (*variables, *(vars(sys.modules[name]) for name in files if name in sys.modules)):
            self._look_into(item, _DEPTH + 1, owned=False)  # a namespace is not one more step
        self._look_at_rest()

    def was_there(self, tensor: Tensor) -> bool:
        """Whether a tensor, or one that shares its memory, was in an attribute or a variable at the start.

        Parameters and buffers are not meant.
        """
        memory = storage_key(tensor)
        return self._tensors.has_noted(memory) and memory not in self._registered

    def __exit__(self, *exc_info: object) -> None:
        self._elsewhere |= names_written_elsewhere()  # a thread may have been started since
        for container, content in self._owned:
            put_all_back(container, content)
        for container, content in self._shared:
            self._note_stand_ins(set(map(id, items_of(content))), items_of(container))
            put_plain_back(container, content, self._is_new_fake, but=self._elsewhere)
        for item, content in self._slotted:
            self._note_stand_ins(set(map(id, content.values())), list(slots_of(item).values()))
            put_slots_back(item, content, self._is_new_fake, but=self._elsewhere)
        for put_back in self._random_states:
            put_back()
        for array, copy in self._arrays:
            if array.shape != copy.shape:
                array.resize(copy.shape, refcheck=False)
            if array.tobytes() != copy.tobytes():
                array[...] = copy
        for cell, content in self._cells:
            if not _has(cell):
                continue
            self._note_stand_ins({id(content)}, [cell.cell_contents])
            now = cell.cell_contents
            if now is not content and (self._is_new_fake(now) or (is_plain(now) and is_plain(content))):
                cell.cell_contents = content
        for kind, names in self._classes:
            for name, item in list(vars(kind).items()):
                if item is names.get(name):
                    continue
                is_plain_here = name not in self._elsewhere and is_plain(item)
                if self._is_new_fake(item) or (is_plain_here and is_plain(names.get(name))):
                    _restore_name(kind, name, names)
        for cache, misses in self._caches:
            # The garbage collector sees what is in it: results, and tuples and dictionaries of them.
            filled = cache.cache_info().misses != misses
            if filled and any(map(self._is_new_fake, gc.get_referents(cache))):
                cache.cache_clear()
        too_large = self._tensors.restore()
        if too_large is not None and exc_info[0] is None:
            raise too_large

    def _look_into(self, item: Any, depth: int, *, owned: bool) -> None:
        """Has a look taken, in turn, at an object.

        Args:
            item: the object.
            depth: how far to look into it.
            owned: a module holds it.
        """
        self._rest.append((item, depth, owned))

    def _look_at_rest(self) -> None:
        """Looks at all that is left to be looked at, first at what is near: it is looked into deepest."""
        while self._rest:
            self._look_at(*self._rest.popleft())

    def _look_at(self, item: Any, depth: int, owned: bool) -> None:
        """Takes note of a container, and of what that or a plain object holds."""
        if type(item) in PLAIN or id(item) in self._seen:
            return
        kind = type(item)  # not isinstance(): a proxy may do things when it is asked for its class
        if issubclass(kind, _SKIPPED):
            if issubclass(kind, type) and depth > 0 and not owned and _is_the_scripts(item):
                self._look_into_class(item, depth)
            return
        if issubclass(kind, nn.Module) and (owned or item in self._modules):
            return
        if _is_of(kind, _AT_WORK):
            return
        size = len(item) if kind in CONTAINERS else 1
        if size > min(self._left[owned], _LONGEST):
            return
        self._left[owned] -= size
        if issubclass(kind, Tensor):
            self._seen.add(id(item))
            self._tensors.keep(item, most_bytes=None if owned else _LARGEST_SHARED)
            return
        if issubclass(kind, torch.Generator):
            self._seen.add(id(item))
            self.generators.append(item)
            return
        if kind is np.ndarray:
            self._keep_array(item)
            return
        if (put_back := kept_state(item)) is not None:
            self._seen.add(id(item))
            self._random_states.append(put_back)
            return
        if depth == 0:
            return
        self._seen.add(id(item))
        if kind is _LruCache:
            self._caches.append((item, item.cache_info().misses))
            return
        held: Collection[Any]
        if kind in CONTAINERS:
            (self._owned if owned else self._shared).append((item, content_of_variable(item)))
            names = self._elsewhere if isinstance(item, dict) and not owned else frozenset()
            held = [v for k, v in list(item.items()) if k not in names] if names else items_of(item)
        elif issubclass(kind, tuple):
            held = item
        elif is_plain_object(item):
            held = (vars(item),)
            depth += 1  # its namespace is not one more step
        elif issubclass(kind, nn.Module) and not owned:  # a metric
            self._shared.append((vars(item), dict(vars(item))))
            own = [value for key, value in vars(item).items() if key not in OF_EVERY_MODULE]
            held = [*item._buffers.values(), *own]
        elif not _is_of(kind, _NOT_OURS) and (slots := slots_of(item)):
            self._slotted.append((item, slots))
            held = [content for slot, content in slots.items() if slot.__name__ not in self._elsewhere]
        else:
            return
        for inner in held:
            self._look_into(inner, depth - 1, owned=owned)

    def _note_stand_ins(self, before: Collection[int], items: list[Any]) -> None:
        """Takes note of what is new among the content of a variable, or of a container in one."""
        for item in items:
            if type(item) is DeferredTensor and id(item) not in before:
                self.stand_ins.append(item)
            elif type(item) in {*CONTAINERS, tuple} and id(item) not in self._seen and len(item) <= _LONGEST:
                self.stand_ins += [inner for inner in items_of(item) if type(inner) is DeferredTensor]

    def _keep_array(self, array: Any) -> None:
        """Keeps what is in an array of NumPy, if that is not much: counts, sums."""
        self._seen.add(id(array))
        most = min(_LARGEST_SHARED, self._array_bytes_left)
        if array.nbytes <= most and array.flags.writeable and not array.dtype.hasobject:
            self._array_bytes_left -= array.nbytes
            self._arrays.append((array, array.copy()))

    def _look_into_class(self, kind: type, depth: int) -> None:
        """Takes note of a class of the model or the script, and of what its attributes hold."""
        names = dict(vars(kind))
        if len(names) > self._left[False]:
            return
        self._seen.add(id(kind))
        self._left[False] -= len(names)
        self._classes.append((kind, names))
        for name, item in names.items():
            if name not in self._elsewhere:
                self._look_into(item, depth, owned=False)

    def _is_new_fake(self, item: Any, depth: int = _DEPTH) -> bool:
        """Whether it stands for something in a trace, or is a container of such that was not there."""
        if type(item) in PLAIN:
            return False
        if issubclass(type(item), FakeTensor | DeferredTensor | WatchedNumber):
            return True
        if depth == 0 or id(item) in self._seen or type(item) not in {*CONTAINERS, tuple}:
            return False
        return len(item) <= _LONGEST and any(self._is_new_fake(i, depth - 1) for i in items_of(item))


def _restore_name(kind: type, name: str, names: dict[str, Any]) -> None:
    if name in names:
        setattr(kind, name, names[name])
    else:
        delattr(kind, name)


def _is_of(kind: type, prefixes: tuple[str, ...]) -> bool:
    return f"{kind.__module__}.".startswith(prefixes)


def _is_the_scripts(kind: type) -> bool:
    """Whether a class is of a file of the user's own; installed packages have thousands of them."""
    return not _is_of(kind, _NOT_OURS) and is_script_class(kind)


def _variables_of(function: Any) -> list[Any]:
    """The variables of a function's file, the object of a method, and what arguments are by default."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *_variables_of(function.func)]
    names = ("__globals__", "__self__", "__defaults__", "__kwdefaults__")
    found = [getattr(function, name, None) for name in names]
    wrapped = getattr(function, "__wrapped__", None)
    return found if wrapped is None else found + _variables_of(wrapped)


def _cells_of(function: Any, depth: int = _DEPTH) -> list[tuple[str, CellType]]:
    """The variables of the functions around a function, and of functions there, with their names."""
    if isinstance(function, functools.partial):
        return _cells_of(function.func, depth)
    cells = getattr(function, "__closure__", None) or ()
    found = list(zip(function.__code__.co_freevars, cells, strict=True)) if cells else []
    inner = [cell.cell_contents for cell in cells if depth > 0 and _has(cell)]
    for each in inner:
        if type(each) is FunctionType:
            found += _cells_of(each, depth - 1)
    wrapped = getattr(function, "__wrapped__", None)
    return found if wrapped is None else found + _cells_of(wrapped, depth)


def _has(cell: CellType) -> bool:
    """Whether a variable has been assigned to."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


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
