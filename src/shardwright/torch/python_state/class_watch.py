"""Tells when Python code reads or writes attributes of objects of a class."""

from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["ClassWatch"]

_METHODS = ("__getattribute__", "__setattr__")


class ClassWatch:
    """Puts methods into classes that tell of reads and writes, and takes them out again.

    Args:
        on_read: called with an object and the name of its attribute, before that is read.
        on_write: called with an object, the name of its attribute, and what writes it.
    """

    def __init__(
        self, on_read: Callable[[Any, str], None], on_write: Callable[[Any, str, Callable[[], None]], None]
    ):
        self._on_read = on_read
        self._on_write = on_write
        self._own: dict[type, tuple[Any, ...]] = {}  # methods that a class itself had

    def watch(self, kind: Any, *, reads: bool = True) -> bool:
        """Watches objects of a class and its children; False for a class that cannot be written to.

        Args:
            kind: the class.
            reads: or else writes alone.
        """
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
