"""What Python code can get at from some variables, and whether it is still what it was.

A walk from the variables that code names and the objects that it is given, through the attributes that it
names, the containers and the objects in them::

    scale          a global variable    its value
    self           an argument          vars(self)["depth"], and what is in it, but no attribute nobody names
    time.time      through a module     refused: a function of C that gives another value each time
"""

import functools
import operator
import random
import re
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.python_state.snapshot import is_of_a_library
from shardwright.torch.pytorch.tree import ABSENT, entries_of, slots_of

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented)}
    | {torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, re.Pattern}
)
_OF_C = (
    *(BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType),
    *(GetSetDescriptorType, MemberDescriptorType),
)
_DESCRIPTORS = (property, classmethod, staticmethod, functools.cached_property)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)
_PURE_MODULES = frozenset(
    "builtins math cmath operator _operator itertools functools _functools collections _collections typing "
    "types abc _abc copy dataclasses enum contextlib numbers re string inspect torch einops "
    "__future__ collections.abc typing_extensions packaging _weakref weakref".split()
)
_IMPURE_BUILTINS = frozenset({print, input, open, exec, eval, compile, breakpoint, __import__})
# Followed as such: each batch takes the parameters, buffers and modules that are there.
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "__dict__"})
_AT_WORK = ("shardwright.", "smdistributed.")
# Registries, locks, queues.
_AT_WORK_ELSEWHERE = ("asyncio.", "concurrent.", "logging.", "multiprocessing.", "queue.", "threading.")
_MOST_HOLDERS = 4_000
_LONGEST = 4_000


_Read = Callable[[Any], Iterable[Any]]


class ImpureError(Exception):
    """Code does what a replay would not do, or reads what cannot be compared."""


class _TooMuchError(ImpureError):
    """There is more than can be compared in each batch."""


class Binding:
    """A variable.

    Attributes:
        is_followed: that is a module, of which one attribute alone is used.
    """

    __slots__ = ("holder", "is_followed", "key", "name", "value")

    def __init__(self, name: str, holder: Any, key: str):
        self.name, self.holder, self.key = name, holder, key
        self.is_followed = False
        self.value = holder.cell_contents if type(holder) is CellType else holder.get(key, ABSENT)

    @property
    def is_open_module(self) -> bool:
        """Whether it is a module of Python's code, of which code uses parts."""
        return isinstance(self.value, ModuleType) and not _is_pure_module(self.value.__name__)


def attribute_behind(module: ModuleType, name: str) -> Binding:
    """A variable of a module."""
    is_python = str(getattr(module, "__file__", None)).endswith(".py")
    if not is_python and not _is_pure_module(module.__name__):
        raise ImpureError(f"the module {module.__name__} is used")
    getattr(module, name, None)  # one that imports what it names has it from now on
    return Binding(f"{module.__name__}.{name}", vars(module), name)


def _is_pure_module(name: str | None) -> bool:
    return name is not None and (name in _PURE_MODULES or name.split(".")[0] == "torch")


class HeldState:
    """What code can get at, as it is now."""

    def __init__(
        self,
        bindings: Iterable[Binding],
        given: Iterable[Any],
        *,
        names: Collection[str] = (),
        modules: Collection[int] = (),
    ):
        self._names, self._modules = frozenset(names), modules
        self._looked_at: dict[int, tuple[Any, bool]] = {}
        self._held: list[_Held] = []
        self._rest: deque[tuple[Any, str, bool]] = deque()  # with its name, and whether code names it
        variables: dict[int, tuple[Any, dict[str, None]]] = {}
        for binding in bindings:
            if type(binding.holder) is CellType:
                self._held.append(_Held(binding.name, _cell_read, binding.holder))
            else:
                variables.setdefault(id(binding.holder), (binding.holder, {}))[1][binding.key] = None
            if not binding.is_followed:
                self._rest.append((binding.value, binding.name, True))
        for holder, keys in variables.values():
            self._held.append(_Held(", ".join(keys), _some_of(keys & holder.keys()), holder))
        self._rest += [(item, type(item).__name__, True) for item in given]
        while self._rest:
            self._look(*self._rest.popleft())
        self._all = _AllHeld(self._held)

    def changed(self) -> str | None:
        if self._all.is_same():
            return None
        for held in self._held:
            if not held.is_same():
                return held.name
        self._all = _AllHeld(self._held)  # what is equal counts as the same from now on
        return None

    @property
    def num_holders(self) -> int:
        """Objects that are compared."""
        return len(self._held)

    # ---- the walk ----

    def _look(self, item: Any, name: str, is_named: bool) -> None:
        kind = type(item)
        known = self._looked_at.get(id(item))
        if kind in _PLAIN or item is ABSENT or (known is not None and (known[1] or not is_named)):
            return
        if f"{kind.__module__}.".startswith(_AT_WORK):
            return
        self._looked_at[id(item)] = item, is_named
        if isinstance(item, Tensor | Enum | torch.Generator):
            return
        try:
            self._look_into(item, name, is_named)
        except ImpureError as error:
            if is_named or isinstance(error, _TooMuchError):
                raise  # else: what code does not name, it may hold

    def _look_into(self, item: Any, name: str, is_named: bool) -> None:
        if isinstance(item, type):
            self._look_at_class(item, name)
        elif isinstance(item, ModuleType):
            if not _is_pure_module(item.__name__):
                raise ImpureError(f"{name} is the module {item.__name__}")
        elif isinstance(item, _OF_C):
            self._look_at_function_of_c(item, name)
        elif isinstance(item, FunctionType):
            parts = _parts_of_function(item)
            self._hold(name, _parts_of_function, item, dict(enumerate(parts[1:])))
            if item.__dict__:
                self._hold_all(name, item.__dict__)
        elif isinstance(item, MethodType):
            self._go_on(item.__self__, name, is_named)
            self._go_on(item.__func__, name, is_named)
        elif isinstance(item, functools.partial):
            for part in (item.func, item.args, item.keywords):
                self._go_on(part, name, is_named)
        elif isinstance(item, functools._lru_cache_wrapper):
            self._held.append(_Held(name, _content_of_cache, item))
        elif isinstance(item, weakref.ref):
            self._go_on(item(), name, is_named)
        elif isinstance(item, ContextVar):
            self._hold(name, lambda variable: (_content_of(variable),), item, {"get": _content_of(item)})
        elif isinstance(item, random.Random):
            raise ImpureError(f"{name} draws random numbers of Python")
        elif not isinstance(item, _DESCRIPTORS):
            self._look_inside(item, name)

    def _look_inside(self, item: Any, name: str) -> None:
        kind = type(item)
        known = isinstance(item, _CONTAINERS)
        if known:
            if len(item) > _LONGEST:
                raise ImpureError(f"{name} has {len(item)} entries")
            for read in _all_of(item):
                self._held.append(_Held(name, read, item, counted=True))
            self._go_on_with(name, {} if isinstance(item, frozenset) else entries_of(item), is_named=True)
        slots = tuple(slots_of(kind))
        if slots:
            read = _slots_read(slots)
            self._hold(name, read, item, dict(zip(slots, read(item), strict=True)))
        if kind.__dictoffset__:
            if isinstance(item, nn.Module) and id(item) in self._modules:
                self._hold_named(name, vars(item))
            elif f"{kind.__module__}.".startswith(_AT_WORK_ELSEWHERE):
                self._held.append(_Held(name, dict.values, vars(item), counted=True))
            else:
                self._hold_all(name, vars(item))
        if slots or kind.__dictoffset__:
            known = True
            self._go_on(kind, kind.__name__, is_named=False)
        if not known:
            raise ImpureError(f"{name} is a {kind.__module__}.{kind.__qualname__}")

    def _look_at_class(self, item: type, name: str) -> None:
        if is_of_a_library(item) or _is_pure_module(item.__module__):
            return
        for base in item.__mro__:
            if is_of_a_library(base) or _is_pure_module(base.__module__):
                continue
            namespace = vars(base)
            found = {key: namespace[key] for key in self._names & namespace.keys()}
            self._held.append(_Held(name, _some_of(found), namespace, counted=True))
            methods = (FunctionType, *_DESCRIPTORS, *_OF_C)
            data = {key: entry for key, entry in found.items() if not isinstance(entry, methods)}
            self._go_on_with(name, data, is_named=True)

    def _look_at_function_of_c(self, item: Any, name: str) -> None:
        module = getattr(item, "__module__", None)
        if module is None:
            owner = getattr(item, "__objclass__", None) or type(getattr(item, "__self__", None))
            module = owner.__module__
        own = getattr(item, "__self__", None)
        if isinstance(own, type):
            module = own.__module__
        elif own is not None and not isinstance(own, ModuleType):
            self._go_on(own, name, True)
        if not _is_pure_module(module) or (item in _IMPURE_BUILTINS if module == "builtins" else False):
            raise ImpureError(f"{getattr(item, '__qualname__', name)} of {module} is called")

    def _hold_named(self, name: str, namespace: dict[str, Any]) -> None:
        """Holds the attributes of one of the model's modules that code names."""
        found = {key: namespace[key] for key in self._names & namespace.keys() - _OF_MODULES}
        self._held.append(_Held(name, _some_of(found), namespace, counted=True))
        self._go_on_with(name, found, is_named=True)

    def _hold_all(self, name: str, namespace: dict[str, Any]) -> None:
        """Holds all attributes: code may read them by names that stand nowhere in it."""
        for read in (dict.keys, dict.values):
            self._held.append(_Held(name, read, namespace, counted=True))
        for key, entry in namespace.items():
            self._go_on(entry, f"{name}.{key}", is_named=key in self._names)

    def _hold(self, name: str, read: _Read, holder: Any, entries: dict[Any, Any]) -> None:
        self._held.append(_Held(name, read, holder))
        self._go_on_with(name, entries, is_named=True)

    def _go_on_with(self, name: str, entries: Mapping[Any, Any], *, is_named: bool) -> None:
        if len(self._held) > _MOST_HOLDERS:
            raise _TooMuchError(f"more than {_MOST_HOLDERS} objects are in reach of the code between units")
        for key, entry in entries.items():
            self._go_on(entry, f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]", is_named)

    def _go_on(self, item: Any, name: str, is_named: bool) -> None:
        if type(item) not in _PLAIN:
            self._rest.append((item, name, is_named))


def _parts_of_function(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _content_of_cache(cached: Any) -> tuple[int, int]:
    info = cached.cache_info()
    return info.misses, info.currsize


class _Held:
    """Some entries of a holder."""

    __slots__ = ("counted", "expected", "holder", "name", "read")

    def __init__(self, name: str, read: _Read, holder: Any, *, counted: bool = False):
        self.name, self.read, self.holder, self.counted = name, read, holder, counted
        self.expected = self._now()

    def is_same(self) -> bool:
        """Whether the entries are as they were; equal numbers and texts of one type are."""
        try:
            now = self._now()
        except Exception:
            return False
        if len(now) != len(self.expected) or not all(map(_is_equal, now, self.expected)):
            return False
        self.expected = now
        return True

    def _now(self) -> tuple[Any, ...]:
        length = (len(self.holder),) if self.counted else ()
        return (*length, *self.read(self.holder))


class _AllHeld:
    """The same of many holders at once, by identity, which is fast."""

    __slots__ = ("_expected", "_lengths", "_reads", "_sized")

    def __init__(self, held: Iterable[_Held]):
        self._sized = [each.holder for each in held if each.counted]
        self._lengths = list(map(len, self._sized))
        self._reads = [(each.read, each.holder) for each in held if each.read is not _nothing]
        self._expected = self._now()

    def is_same(self) -> bool:
        try:
            if list(map(len, self._sized)) != self._lengths:
                return False
            now = self._now()
        except Exception:
            return False
        return len(now) == len(self._expected) and all(map(operator.is_, now, self._expected))

    def _now(self) -> list[Any]:
        found: list[Any] = []
        for read, holder in self._reads:
            found += read(holder)
        return found


def _some_of(keys: Iterable[Any]) -> _Read:
    keys = tuple(keys)
    if not keys:
        return _nothing
    return operator.itemgetter(*keys, keys[0])  # of two and more, it gives a tuple


def _all_of(holder: Any) -> list[_Read]:
    if isinstance(holder, dict):
        return [dict.keys, dict.values]
    if isinstance(holder, set):
        copied = set(holder)
        return [lambda now: (set.__eq__(now, copied),)]
    if isinstance(holder, list | deque):
        return [iter]
    if isinstance(holder, MappingProxyType):
        return [MappingProxyType.keys, MappingProxyType.values]
    return []  # nothing changes it


def _slots_read(names: tuple[str, ...]) -> _Read:
    return lambda item: tuple(getattr(item, name, ABSENT) for name in names)


def _cell_read(cell: CellType) -> tuple[Any]:
    return (cell.cell_contents,)


def _nothing(holder: Any) -> tuple[()]:
    return ()


def _content_of(variable: ContextVar[Any]) -> Any:
    """What a context variable holds; None for a container in which nothing is collected."""
    held = variable.get(None)
    return None if type(held) in (dict, list) and not held else held


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and bool(one == other))
