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

__all__ = ["ObjectStates"]


class ObjectStates:
    """Sees which attributes of objects a call of a unit changes, and who reads them later.

    Args:
        on_read: called when somebody else reads an attribute than who wrote it last: with the node that
            wrote it, and its name.
    """

    def __init__(self, on_read: Callable[[int, str], None]):
        self._on_read = on_read
        self._node: int | None = None
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self._writers: dict[tuple[int, str], int] = {}
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

    def leave(self) -> None:
        """The call has ended."""
        node, self._node = self._node, None
        assert node is not None
        for item, before in self._before:
            now = vars(item)
            for key in [key for key in {**before, **now} if now.get(key) is not before.get(key)]:
                if not isinstance(getattr(type(item), key, None), cached_property):
                    self._watch(item)
                    self._writers[id(item), key] = node
        self._before = []

    def _watch(self, item: Any) -> None:
        self._keep_alive.append(item)
        kind: Any = type(item)
        if kind in self._patched:
            return
        plain_read, plain_write = kind.__getattribute__, kind.__setattr__

        def read(item: Any, key: str) -> Any:
            writer = self._writers.get((id(item), key))
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

        own = tuple(vars(kind).get(name) for name in ("__getattribute__", "__setattr__"))
        try:
            kind.__getattribute__, kind.__setattr__ = read, write
        except TypeError:  # a class that is not Python's own
            return
        self._patched[kind] = own

    def forget(self) -> None:
        """Leaves classes and objects as they were."""
        for kind, methods in self._patched.items():
            for name, method in zip(("__getattribute__", "__setattr__"), methods, strict=True):
                if method is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, method)
        self._patched.clear()
        self._writers.clear()
        self._keep_alive.clear()


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
                pending += [value for key, value in vars(sub).items() if key not in _OF_EVERY_MODULE]
        elif type(item) in (dict, list, tuple):  # others may do things when they are read
            if len(item) <= _LONGEST:
                pending += item.values() if isinstance(item, dict) else item
        elif is_plain_object(item):
            yield item
            pending += vars(item).values()


_LONGEST, _MOST = 1_000, 10_000  # what is beyond is data
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_WITHOUT_STATE = (Tensor, type, type(None), bool, int, float, complex, str, bytes)
