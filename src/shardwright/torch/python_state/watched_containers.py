"""Lists and dictionaries that tell when a unit reads there what others have put there."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from shardwright.torch.python_state.snapshot import entries_of
from shardwright.torch.pytorch.container_content import ABSENT

__all__ = ["OnRead", "WatchedDict", "WatchedList", "original_of"]

OnRead = Callable[[int], None]


class _Watch:
    """What others have put into one container.

    Args:
        on_read: called with the node that has changed what is read.
        changes: entry -> who has changed it, and what is there.
        original: the container that this one stands for.
    """

    def __init__(self, on_read: OnRead, changes: Mapping[Any, tuple[int, Any]], original: Any):
        self._on_read = on_read
        self._changes = changes
        self.original = original

    def entry(self, key: Any, value: Any) -> None:
        """An entry is read, which has this value now."""
        node, theirs = self._changes.get(key, (None, None))
        if node is not None and value is theirs:
            self._on_read(node)

    def of_copy(self, container: Any) -> tuple[OnRead, Mapping[Any, tuple[int, Any]], Any]:
        """What a copy is made with, so that reading it counts as well."""
        nodes = {key: node for key, (node, _) in self._changes.items()}
        changes = {key: (nodes[key], value) for key, value in _known_entries(container, nodes)}
        return self._on_read, changes, self.original

    def all(self, container: Any) -> None:
        """Everything is read."""
        for key, value in _known_entries(container, self._changes):
            self.entry(key, value)

    def size(self, container: Any) -> None:
        """The number of entries is read.

        Caches of keys and values ask how many there are, and do without those of other ranks.
        """
        for key, value in _known_entries(container, self._changes):
            if not isinstance(value, Tensor):
                self.entry(key, value)

    def item(self, container: list[Any], index: Any) -> None:
        """An item of a list is read, or a stretch of it."""
        if not isinstance(index, int):
            self.all(container)
            return
        place = index if index >= 0 else index + list.__len__(container)
        self.entry(place, dict(_known_entries(container, (place,)))[place])


def _known_entries(container: Any, keys: Iterable[Any]) -> list[tuple[Any, Any]]:
    entries = entries_of(container)
    return [(key, entries.get(key, ABSENT)) for key in keys]


def _tells(name: str, kind: type) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.watch.all(self)
        return plain(self, *args, **kwargs)

    return method


def _tells_entry(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: Any, key: Any, *args: Any) -> Any:
        self.watch.entry(key, dict.get(self, key, ABSENT))
        return plain(self, key, *args)

    return method


class _Watched:
    """What watched lists and dictionaries have in common, before the container among their bases."""

    def __init__(self, items: Any, *watch: Any):
        super().__init__(items)  # type: ignore[call-arg]
        self.watch = _Watch(*watch)

    def __len__(self) -> int:
        self.watch.size(self)
        return super().__len__()  # type: ignore[misc, no-any-return]


class WatchedList(_Watched, list[Any]):
    """A list in place of one that others have changed."""

    def __getitem__(self, index: Any) -> Any:
        self.watch.item(self, index)
        return super().__getitem__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedList":
        items = copy.deepcopy(list.copy(self), memo)
        return WatchedList(items, *self.watch.of_copy(items))


class WatchedDict(_Watched, dict[Any, Any]):
    """A dictionary in place of one that others have changed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedDict":
        items = copy.deepcopy(dict(dict.items(self)), memo)
        return WatchedDict(items, *self.watch.of_copy(items))


def original_of(value: Any) -> Any:
    """The container that a watched one stands for; anything else as it is."""
    return value.watch.original if isinstance(value, WatchedList | WatchedDict) else value


_READ_ALL = ("__iter__", "__eq__", "__reversed__", "copy")
_READ_LIST = ("__contains__", "__add__", "__mul__", "index", "count", "pop", "sort")
_READ_DICT = ("__or__", "keys", "values", "items", "popitem")
_READ_ENTRY = ("__getitem__", "__contains__", "get", "pop", "setdefault")
for _name in _READ_ALL + _READ_LIST:
    setattr(WatchedList, _name, _tells(_name, list))
for _name in _READ_ALL + _READ_DICT:
    setattr(WatchedDict, _name, _tells(_name, dict))
for _name in _READ_ENTRY:
    setattr(WatchedDict, _name, _tells_entry(_name))
