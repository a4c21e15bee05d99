"""Lists and dictionaries that modules and objects hold and units change: skips that blocks push and pop.

Each rank has such a container of its own, and only the rank of a unit sees what the unit does to it::

    self.shared.skips.append(x)         in one unit
    y = y + self.shared.skips.pop()     in another: must be on the rank of the first

Reads are seen by the entry, because of the caches of Mamba, Jamba, Qwen3-Next and T5: they hold a flag or a
number for each layer, of which a layer reads its own.

While a unit runs in a trace, those that other units have changed are replaced by copies that tell when they
are read.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from shardwright.torch.python_state.reachable import Reach
from shardwright.torch.python_state.snapshot import entries_of
from shardwright.torch.python_state.watched_containers import (
    OnRead,
    WatchedDict,
    WatchedList,
    original_of,
)
from shardwright.torch.pytorch.container_content import ABSENT, PLAIN, content_of, is_same, put_content
from shardwright.torch.pytorch.tree import leaves

__all__ = ["HeldContainers"]


class HeldContainers:
    """Knows which calls of units changed which entries.

    Args:
        on_read: called with the node that has changed what somebody else reads.
        is_everywhere: tells of what is put there whether every rank has the same, or makes it for itself.
        as_fake: gives a fake tensor for one that a call on random data has put into a copy.
    """

    def __init__(
        self, on_read: OnRead, is_everywhere: Callable[[Any], bool], as_fake: Callable[[Tensor], Tensor]
    ):
        self._on_read = on_read
        self._is_everywhere = is_everywhere
        self._as_fake = as_fake
        # id of a container -> entry -> the call that changed it last, and what it put there.
        self._changes: dict[int, dict[Any, tuple[int, Any]]] = {}
        self._node = -1
        self._before: list[tuple[Any, dict[Any, Any]]] = []
        self._watched: dict[int, tuple[Any, Any]] = {}  # id of a container -> it, and what tells in its place
        self._slots: list[tuple[Any, Any, Any]] = []
        self._copies: list[tuple[Any, Any, dict[Any, Any]]] = []  # a copy, what it stands for, what was in it
        self._keep_alive: list[Any] = []

    def enter(self, node: int, reach: Reach) -> None:
        """A call begins.

        Args:
            node: its index.
            reach: what it can get at.
        """
        self._node = node
        self._before = [(container, entries_of(container)) for container in reach.containers]
        if not self._changes:
            return
        for container in reach.containers:
            changes = self._of_others(container)
            if changes and type(container) in (list, dict):
                kind = WatchedList if type(container) is list else WatchedDict
                watched = kind(content_of(container), self._on_read, changes, container)
                self._watched[id(container)] = container, watched
        for holder, key, container in reach.slots:
            if id(container) in self._watched:
                _, stands_in = self._watched.get(id(holder), (None, holder))
                _put(stands_in, key, self._watched[id(container)][1])
                self._slots.append((stands_in, key, container))

    def _of_others(self, container: Any) -> dict[Any, tuple[int, Any]]:
        """The entries that are as another unit has left them."""
        changes, entries = self._changes.get(id(container), {}), entries_of(container)
        return {
            key: (node, value)
            for key, (node, value) in changes.items()
            if node != self._node and entries.get(key, ABSENT) is value
        }

    def stands_for(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """The call is given copies of containers, and what it does there is done to these, too."""
        self._copies += [(copy, original_of(held), entries_of(copy)) for copy, held in pairs]

    def leave(self) -> None:
        """The call has ended."""
        for holder, key, container in self._slots:
            if entries_of(holder).get(key) is self._watched[id(container)][1]:
                _put(holder, key, container)
        for container, watched in self._watched.values():
            put_content(container, content_of(watched))
        self._slots.clear()
        self._watched.clear()
        for container, before in self._before:
            for key, value in self._changed(before, container):
                self._note(container, key, value)
        for copy, container, before in self._copies:
            for key, value in self._changed(before, copy):
                own = self._as_fake(value) if isinstance(value, Tensor) else value
                if own is value and type(value) not in PLAIN:
                    own = entries_of(container).get(key, ABSENT)  # it stays as it is
                elif key in entries_of(container) or not isinstance(container, list):
                    _put(container, key, own)
                else:
                    list.append(container, own)
                self._note(container, key, own)
        self._before.clear()
        self._copies.clear()

    def _changed(self, before: dict[Any, Any], container: Any) -> Iterator[tuple[Any, Any]]:
        """The entries that are no longer the same, and that tell ranks apart."""
        now = entries_of(container)
        for key in {**before, **now}:
            value = now.get(key, ABSENT)
            if not is_same(value, before.get(key, ABSENT)) and self._tells_ranks_apart(value):
                yield key, value

    def _note(self, container: Any, key: Any, value: Any) -> None:
        self._changes.setdefault(id(container), {})[key] = self._node, value
        self._keep_alive.append(container)

    def _tells_ranks_apart(self, value: Any) -> bool:
        """Whether it is data. Objects that units find or make (the layers of a cache) are looked into."""
        parts = [value] if value is ABSENT else leaves(value)
        return any(
            part is ABSENT
            or type(part) in PLAIN
            or (isinstance(part, Tensor) and not self._is_everywhere(part))
            for part in parts
        )


def _put(holder: Any, key: Any, item: Any) -> None:
    (list if isinstance(holder, list) else dict).__setitem__(holder, key, item)
