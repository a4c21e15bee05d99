"""Snapshots of holders' Python state, walks of what code can get at, watches of reads and writes."""

import copy
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.pytorch.tree import (
    ABSENT,
    Slot,
    entries_of,
    inside_of,
    is_same,
    put_entries,
    put_entry,
    same_entries,
    slots_of,
    versions_of,
)

_METHODS = ("__getattribute__", "__setattr__")

ALL: Any = object()  # in place of a key: every entry is read

OnRead = Callable[[Any, Any], None]
"""Called with a holder and the key of the slot that is read."""


class ClassWatch:
    """Puts methods into classes that tell of reads and writes, and takes them out again."""

    def __init__(self, on_read: OnRead, on_write: Callable[[Any, str, Callable[[], None]], None]):
        self._on_read = on_read
        self._on_write = on_write
        self._own: dict[type, tuple[Any, ...]] = {}  # methods that a class itself had

    def watch(self, kind: Any, *, reads: bool = True) -> bool:
        """Watches objects of a class and its children; False for a class that cannot be written to."""
        if kind in self._own:
            return True
        plain_read, plain_write = kind.__getattribute__, kind.__setattr__

        def read(item: Any, key: str) -> Any:
            self._on_read(item, key)
            return plain_read(item, key)

        def write(item: Any, key: str, value: Any) -> None:
            self._on_write(item, key, partial(plain_write, item, key, value))

        self._own[kind] = tuple(vars(kind).get(name) for name in _METHODS)
        try:
            if reads:
                kind.__getattribute__ = read
            kind.__setattr__ = write
        except Exception:  # a class that is not Python's own, or that does not let itself be written to
            self._put_back(kind)
            return False
        return True

    def forget(self) -> None:
        for kind in list(self._own):
            self._put_back(kind)

    def _put_back(self, kind: type) -> None:
        for name, method in zip(_METHODS, self._own.pop(kind), strict=True):
            if vars(kind).get(name) is method:
                continue
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)


class WatchedDict(dict[Any, Any]):
    """A dictionary that stands in for another one, and tells when entries of that are read."""

    def __init__(self, original: dict[Any, Any], on_read: OnRead, items: dict[Any, Any]):
        super().__init__(items)
        self.original = original
        self._on_read = on_read
        self.begin()

    def begin(self) -> None:
        """Starts a call: entries written from now on are its own, and reads of them are not told."""
        self._first = entries_of(self)

    def _tell(self, key: Any) -> None:
        if key is ALL or entries_of(self).get(key, ABSENT) is self._first.get(key, ABSENT):
            self._on_read(self.original, key)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedDict":
        return WatchedDict(self.original, self._on_read, copy.deepcopy(entries_of(self), memo))


def _telling(name: str, *, of_all: bool) -> Callable[..., Any]:
    """A method of dictionaries that tells what it reads: everything, or the entry of its first argument."""
    plain = getattr(dict, name)

    def method(self: WatchedDict, *args: Any, **kwargs: Any) -> Any:
        self._tell(ALL if of_all else args[0])
        return plain(self, *args, **kwargs)

    return method


for _name in "__iter__ __len__ __eq__ __or__ __reversed__ copy items keys popitem values".split():
    setattr(WatchedDict, _name, _telling(_name, of_all=True))
for _name in "__getitem__ __contains__ get pop setdefault".split():
    setattr(WatchedDict, _name, _telling(_name, of_all=False))


# Other kinds may do things when they are read.
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set})
_NOTHING_INSIDE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
_LEAVES = (Tensor, random.Random, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
# Registries, locks, queues.
_LIBRARIES = (
    *("torch.", "builtins.", "typing.", "collections.", "functools.", "asyncio.", "concurrent.", "logging."),
    *("multiprocessing.", "queue.", "threading.", "weakref."),
)
_AT_WORK = ("shardwright.", "smdistributed.")  # in the trace
_LONGEST = 10_000  # what is beyond is data


def walk(
    roots: Iterable[tuple[Any, float]],
    *,
    most: float = math.inf,
    longest: int = _LONGEST,
    skips: Callable[[Any], bool] = lambda item: False,
    enters: Callable[[type], bool] = lambda kind: False,
) -> Iterator[tuple[Any, dict[Any, Any] | None]]:
    """Goes through objects and what they hold, near ones first, each once."""
    rest, seen = deque(roots), set[int]()
    while rest:
        item, steps = rest.popleft()
        # Not isinstance(): a proxy may do things when it is asked for its class.
        kind = type(item)
        if kind in _NOTHING_INSIDE or id(item) in seen or skips(item):
            continue
        holds = enters(item) if issubclass(kind, type) else _has_entries(item)
        if holds and steps <= 0:
            continue
        seen.add(id(item))
        entries = None
        is_sized = kind in _CONTAINERS or issubclass(kind, tuple)
        if holds and most > 0 and (not is_sized or len(item) <= min(most, longest)):
            entries = entries_of(item)
            most -= len(entries)
            rest += [(inner, steps - 1) for inner in entries.values()]
        yield item, entries


def _has_entries(item: Any) -> bool:
    kind = type(item)
    if kind in _CONTAINERS or kind is CellType or kind is WatchedDict:
        return True
    if issubclass(kind, _LEAVES) or f"{kind.__module__}.".startswith(_AT_WORK):
        return False
    if issubclass(kind, tuple | nn.Module):
        return True
    return is_plain_object(item) or (not is_of_a_library(kind) and bool(slots_of(kind)))


def is_of_a_library(kind: type) -> bool:
    """Whether a class is one of Python's or torch's, whose objects keep what is not the model's."""
    return f"{kind.__module__}.".startswith(_LIBRARIES)


def is_plain_object(item: Any) -> bool:
    """Whether it is an object with attributes, of a class of the user's own or of a library of models."""
    if is_of_a_library(type(item)) or not type(item).__dictoffset__:
        return False
    try:
        return type(vars(item)) is dict
    except Exception:
        return False  # a proxy of something that is not there yet


DICTIONARIES = frozenset({dict, OrderedDict, defaultdict})


def namespace_of(holder: Any) -> dict[Any, Any]:
    """The attributes of a module or an object; a dictionary itself."""
    found: dict[Any, Any] = holder if type(holder) in DICTIONARIES else vars(holder)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class SlotContent:
    """The content of one slot of a module, an object or a dictionary at one moment.

    Attributes:
        inside: the entries of that, if it is a container.
        versions: how often tensors there have been changed in place.
    """

    holder: Any
    key: Any
    value: Any
    inside: dict[Any, Any] | None
    versions: tuple[int, ...]

    @classmethod
    def of(cls, holder: Any, key: Any) -> "SlotContent":
        """Takes the content of a slot as it is now."""
        value = namespace_of(holder).get(key, ABSENT)
        return cls(holder, key, value, inside_of(value), versions_of(value))

    @property
    def is_there(self) -> bool:
        """Whether the slot holds this object, whatever is in it by now."""
        return namespace_of(self.holder).get(self.key, ABSENT) is self.value

    def has_same(self, other: "SlotContent") -> bool:
        """Whether both are the same object with the same in it, or equal numbers or texts."""
        return is_same(self.value, other.value) and same_entries(self.inside, other.inside)

    def put(self) -> None:
        """Has the slot hold the object, with whatever is in it."""
        put_entry(namespace_of(self.holder), self.key, self.value)

    def put_with_inside(self) -> None:
        """Has the slot hold the object, and in it what was in it."""
        self.put()
        if self.inside is not None:
            put_entries(self.value, self.inside)


class Snapshot:
    """The entries of some holders, and the versions of tensors among these."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, dict[Any, Any]]] = []
        self._versions: list[tuple[Any, int]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._resized: set[int] = set()

    def add(self, holder: Any) -> dict[Any, Any]:
        """Takes note of a holder's entries, and returns them."""
        entries = entries_of(holder)
        self._before.append((holder, entries))
        tensors = (item for item in entries.values() if type(item) is Tensor and not item.is_inference())
        self._versions += [(tensor, tensor._version) for tensor in tensors]
        return entries

    def follow_size(self, container: Any) -> None:
        """Has `look` see whether a container has grown or shrunk: it may end as it began."""
        self._sizes.append((container, len(container)))

    def look(self) -> None:
        """To be called now and then."""
        resized = [id(container) for container, size in self._sizes if len(container) != size]
        if resized:
            self._resized.update(resized)
            self._sizes = [each for each in self._sizes if id(each[0]) not in self._resized]

    @property
    def changed(self) -> list[Slot]:
        """Slots that hold another object, or a container or a tensor that has changed."""
        touched = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        touched |= self._resized
        both = [(holder, before, entries_of(holder)) for holder, before in self._before]
        for holder, _, now in both:
            is_container = isinstance(holder, dict | list | set)
            if is_container and any(id(item) in touched for item in now.values()):
                touched.add(id(holder))
        touched |= {
            id(holder)
            for holder, before, now in both
            if isinstance(holder, dict | list | set) and not same_entries(now, before)
        }
        return [
            (holder, key)
            for holder, before, now in both
            for key in {**before, **now}
            if not is_same(before.get(key, ABSENT), now.get(key, ABSENT)) or id(now.get(key)) in touched
        ]

    @property
    def new_tensors(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Attributes of modules that hold another tensor."""
        return [
            (holder, key, item)
            for holder, before in self._before
            if isinstance(holder, nn.Module)
            for key, item in vars(holder).items()
            if isinstance(item, Tensor) and item is not before.get(key)
        ]

    def put_back(self) -> None:
        for holder, entries in self._before:
            put_entries(holder, entries)

    def take_out(self, is_meant: Callable[[Any], bool]) -> None:
        """Puts back only what new items of some kind have displaced; other changes stay.

        A dictionary, an object or a class gets single slots back, a list, deque or set all that was in it:
        ``rows.append(loss); sizes.append(1)`` stay as long as each other.
        """
        for holder, before in self._before:
            known = set(map(id, before.values()))
            now = entries_of(holder)
            found = [key for key, item in now.items() if id(item) not in known and is_meant(item)]
            if found and isinstance(holder, list | deque | set):
                put_entries(holder, before)
            else:
                for key in found:
                    put_entry(holder, key, before.get(key, ABSENT))


def snapshot_of(module: nn.Module) -> Snapshot:
    """The attributes of a module and of all modules inside it, and containers among these."""
    found = Snapshot()
    for sub in module.modules():
        for item in found.add(sub).values():
            if isinstance(item, dict | list | set):
                found.add(item)
    return found
