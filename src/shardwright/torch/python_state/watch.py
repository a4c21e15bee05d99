"""Tells when Python code reads or writes attributes of objects, and when it reads entries of dictionaries."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from shardwright.torch.pytorch.slots import ABSENT, entries_of

__all__ = ["ALL", "ClassWatch", "WatchedDict"]

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
        """Leaves the classes as they were."""
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
