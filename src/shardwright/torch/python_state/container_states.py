"""Entries of containers that units change and others read: a list that blocks fill, a count in a dictionary.

A container that is an argument is each rank's own, and only the rank of a unit sees what the unit does to it.
So a unit that looks must be where it was changed::

    feats.append(y)                 changes the list; so does every other block
    x = torch.cat(feats)            looks at all that is in it
    notes["depth"] += 1             looks at one entry, and changes it

In a trace a unit gets copies of its containers (see `filled_containers`). Those that other units have changed
are copies that tell when they are read.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from shardwright.torch.python_state.watched_containers import (
    WATCH,
    OnRead,
    WatchedDict,
    WatchedFields,
    WatchedList,
    entries_of,
    watch_fields,
)
from shardwright.torch.pytorch.container_content import ABSENT, is_same

__all__ = ["ContainerStates"]


class ContainerStates:
    """Knows which calls of units changed which entries.

    Args:
        on_read: called with the node that has changed what somebody else reads.
    """

    def __init__(self, on_read: OnRead):
        self._on_read = on_read
        # id of a container -> entry -> the calls that changed it, each with what it put there.
        self._changes: dict[int, dict[Any, list[tuple[int, Any]]]] = {}
        self._keep_alive: list[Any] = []

    def contents(self, own: Any) -> list[tuple[Any, dict[Any, Any]]]:
        """The containers of a tree, with their entries."""
        return [(container, entries_of(container)) for container in _containers_in(own)]

    def note(self, node: int, before: list[tuple[Any, dict[Any, Any]]]) -> bool:
        """A call has ended; tells whether it was given containers that units change.

        Args:
            node: index of the call.
            before: `contents` before it.
        """
        for container, entries in before:
            now = entries_of(container)
            for key in {**entries, **now}:
                if not is_same(now.get(key, ABSENT), entries.get(key, ABSENT)):
                    entry = self._changes.setdefault(id(container), {}).setdefault(key, [])
                    entry.append((node, now.get(key, ABSENT)))
                    self._keep_alive.append(container)
        return any(id(container) in self._changes for container, _ in before)

    def watched(self, own: Any, given: Any) -> Any:
        """A tree of which is told when it is read.

        Args:
            own: the tree as the step function has it.
            given: the tree that a unit gets in its place.
        """
        if not self._changes:
            return given
        if type(given) is list and len(own) == len(given):
            items = [self.watched(*pair) for pair in zip(own, given, strict=True)]
            changes = self._valid(own, given)
            return WatchedList(items, self._on_read, changes) if changes else items
        if type(given) is tuple:
            return tuple(self.watched(*pair) for pair in zip(own, given, strict=True))
        if type(given) is dict:
            values = {key: self.watched(own[key], value) for key, value in given.items()}
            changes = self._valid(own, values)
            return WatchedDict(values, self._on_read, changes) if changes else values
        if _is_dataclass(given):
            changes = self._valid(own, given)
            if changes:
                watch_fields(given, self._on_read, changes)
        return given

    def _valid(self, own: Any, given: Any) -> dict[Any, tuple[int, Any]]:
        """The entries that are as a unit has left them: which one, and what the next finds there."""
        entries, theirs = entries_of(own), entries_of(given)
        found = {}
        for key, changes in self._changes.get(id(own), {}).items():
            node, value = changes[-1]
            if entries.get(key, ABSENT) is value:
                found[key] = node, theirs.get(key, ABSENT)
        return found

    def plain(self, tree: Any) -> Any:
        """A tree that was watched, or has in it what was, for others to read."""
        if not self._changes:
            return tree
        if isinstance(tree, WatchedList) or type(tree) is list:
            return [self.plain(item) for item in list.__iter__(tree)]
        if type(tree) is tuple:
            return tuple(self.plain(item) for item in tree)
        if isinstance(tree, WatchedDict) or type(tree) is dict:
            return {key: self.plain(value) for key, value in dict.items(tree)}
        kind = type(tree)
        if issubclass(kind, WatchedFields):
            object.__setattr__(tree, "__class__", kind.__mro__[2])
            del vars(tree)[WATCH]
        return tree


def _containers_in(tree: Any) -> Iterator[Any]:
    if type(tree) in (list, dict, tuple):
        if type(tree) is not tuple:
            yield tree
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers_in(item)
    elif _is_dataclass(tree):
        yield tree


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type) and hasattr(item, "__dict__")
