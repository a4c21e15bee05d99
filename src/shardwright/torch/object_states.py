"""Attributes of plain objects that units change and others read: a counter in a context all blocks share.

Such an object is each rank's own, and only the rank of a unit sees what the unit does to it. Whoever reads it
must be where it was written::

    notes.depth += 1            in a unit: read by the next unit, and changed for the one after
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from shardwright.torch.left_behind import is_plain_object
from shardwright.torch.module_tree import OF_EVERY_MODULE

__all__ = ["ObjectStates"]


class ObjectStates:
    """Sees which attributes of objects a call of a unit changes, and who reads them later.

    Args:
        on_read: called when somebody else reads an attribute than who wrote it last: with the node that
            wrote it, and its name.
        is_everywhere: tells of what is written whether every rank has the same, or makes it for itself.
    """

    def __init__(self, on_read: Callable[[int, str], None], is_everywhere: Callable[[Any], bool]):
        self._on_read = on_read
        self._is_everywhere = is_everywhere
        self._node: int | None = None
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self._writers: dict[tuple[int, str], int] = {}
        self._unwatched: dict[int, int] = {}  # object whose attributes cannot be watched -> who wrote to it
        self._stand_ins: dict[int, tuple[Any, Any, dict[str, Any]]] = {}  # id of a copy -> it, the object
        self._keep_alive: list[Any] = []
        self._patched: dict[type, tuple[Any, Any]] = {}

    def enter(self, node: int, roots: Sequence[Any]) -> None:
        """A call begins.

        Args:
            node: its index.
            roots: what it is given, and the unit.
        """
        self._node = node
        self._before = [(item, dict(vars(item))) for item in _objects_in(roots)]
        for item, _ in self._before:
            writer = self._unwatched.get(id(item))
            if writer is not None and writer != node:
                self._on_read(writer, "")

    def stands_for(self, copy: Any, item: Any) -> None:
        """The call is given a copy of an object, and what it does there counts as done to the object."""
        pairs = zip(_objects_in([copy]), _objects_in([item]), strict=False)
        self._stand_ins |= {id(own): (own, original, dict(vars(own))) for own, original in pairs}

    def leave(self) -> None:
        """The call has ended."""
        for item, before in self._before:
            self._note(item, before, vars(item))
        for copy, item, before in self._stand_ins.values():
            self._note(item, before, vars(copy))
        self._before, self._stand_ins, self._node = [], {}, None

    def _note(self, item: Any, before: dict[str, Any], now: dict[str, Any]) -> None:
        assert self._node is not None
        for key in dict.fromkeys([*before, *now]):
            old, new = before.get(key), now.get(key)
            if old is new or (type(old) is type(new) and type(new) in _PLAIN and old == new):
                continue
            if self._is_everywhere(new) or isinstance(getattr(type(item), key, None), cached_property):
                continue
            self._keep_alive.append(item)
            self._writers[id(item), key] = self._node
            if not self._watch(type(item)):
                self._unwatched[id(item)] = self._node

    def _watch(self, kind: Any) -> bool:
        """Sees from now on who reads attributes of objects of a class; False where that cannot be."""
        if kind in self._patched:
            return True
        plain_read, plain_write = kind.__getattribute__, kind.__setattr__

        def read(item: Any, key: str) -> Any:
            _, original, _ = self._stand_ins.get(id(item), (None, item, None))
            writer = self._writers.get((id(original), key))
            if writer is not None and writer != self._node:
                self._on_read(writer, key)
            return plain_read(item, key)

        def write(item: Any, key: str, value: Any) -> None:
            plain_write(item, key, value)
            if (id(item), key) in self._writers:
                if self._node is None:  # code between units, which every rank runs
                    del self._writers[id(item), key]
                else:
                    self._writers[id(item), key] = self._node

        self._patched[kind] = tuple(vars(kind).get(name) for name in _WATCHED)
        try:
            kind.__getattribute__, kind.__setattr__ = read, write
        except Exception:  # a class that is not Python's own, or that does not let itself be written to
            self._put_back(kind)
            return False
        return True

    def _put_back(self, kind: type) -> None:
        for name, method in zip(_WATCHED, self._patched.pop(kind), strict=True):
            if vars(kind).get(name) is method:
                continue
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)

    def forget(self) -> None:
        """Leaves classes and objects as they were."""
        for kind in list(self._patched):
            self._put_back(kind)
        for noted in (self._writers, self._unwatched, self._keep_alive):
            noted.clear()


def _objects_in(roots: Sequence[Any]) -> Iterator[Any]:
    """Objects with attributes that can be reached, each once; no modules and no tensors."""
    seen: set[int] = set()
    pending = list(roots)
    while pending and len(seen) < _MOST:
        item = pending.pop()
        if isinstance(item, _WITHOUT_STATE) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            for sub in item.modules():
                pending += [value for key, value in vars(sub).items() if key not in OF_EVERY_MODULE]
        elif type(item) in (dict, list, tuple):  # others may do things when they are read
            if len(item) <= _LONGEST:
                pending += item.values() if isinstance(item, dict) else item
        elif is_plain_object(item):
            yield item
            pending += vars(item).values()


_PLAIN = frozenset({bool, int, float, str})
_WATCHED = ("__getattribute__", "__setattr__")
_LONGEST, _MOST = 1_000, 10_000  # what is beyond is data
_WITHOUT_STATE = (Tensor, type, type(None), bool, int, float, complex, str, bytes)
