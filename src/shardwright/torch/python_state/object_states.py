"""Attributes of plain objects that units change and others read: a counter in a context all blocks share.

Such an object is each rank's own, and only the rank of a unit sees what the unit does to it. Whoever reads it
must be where it was written::

    notes.depth += 1            in a unit: read by the next unit, and changed for the one after

Reads are seen by the attribute, because of the caches of Hugging Face, which models use in training unless a
script says otherwise: all blocks share one, and each block writes ``is_initialized``, ``keys`` and ``values``
of a layer of its own there, which no other reads.

A module that several units hold may be such an object, too. Tensors in attributes of modules are values of
the graph (see `hidden_inputs`), and what a unit does to its own modules, it alone finds there.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from shardwright.torch.python_state.class_watch import ClassWatch
from shardwright.torch.python_state.reachable import own_attributes
from shardwright.torch.pytorch.container_content import is_same

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
        self._units: dict[int, Any] = {}  # node -> the unit
        self._unwatched: dict[int, int] = {}  # object whose attributes cannot be watched -> who wrote to it
        self._stand_ins: dict[int, tuple[Any, Any, dict[str, Any]]] = {}  # id of a copy -> it, the object
        self._keep_alive: list[Any] = []
        self._watch = ClassWatch(self._reads, self._writes)

    def enter(self, node: int, unit: nn.Module, objects: Sequence[Any]) -> None:
        """A call begins.

        Args:
            node: its index.
            unit: the unit.
            objects: that it can get at.
        """
        self._node = node
        self._units[node] = unit
        self._before = [(item, own_attributes(item)) for item in objects]
        for item, _ in self._before:
            writer = self._unwatched.get(id(item))
            if writer is not None:
                self._read(writer, item, "")

    def stands_for(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """The call is given copies of objects, and what it does there counts as done to the objects."""
        self._stand_ins |= {id(own): (own, original, own_attributes(own)) for own, original in pairs}

    def leave(self) -> None:
        """The call has ended."""
        for item, before in self._before:
            self._note(item, before, own_attributes(item))
        for copy, item, before in self._stand_ins.values():
            self._note(item, before, own_attributes(copy))
        self._before, self._stand_ins, self._node = [], {}, None

    def _note(self, item: Any, before: dict[str, Any], now: dict[str, Any]) -> None:
        assert self._node is not None
        for key in dict.fromkeys([*before, *now]):
            old, new = before.get(key), now.get(key)
            if is_same(old, new) or (isinstance(item, nn.Module) and isinstance(new, Tensor)):
                continue
            if self._is_everywhere(new) or isinstance(getattr(type(item), key, None), cached_property):
                continue
            self._keep_alive.append(item)
            self._writers[id(item), key] = self._node
            if not self._watch.watch(type(item)):
                self._unwatched[id(item)] = self._node

    def _reads(self, item: Any, key: str) -> None:
        original = self._original(item)
        writer = self._writers.get((id(original), key))
        if writer is not None:
            self._read(writer, original, key)

    def _writes(self, item: Any, key: str, write: Callable[[], None]) -> None:
        write()
        place = id(self._original(item)), key
        if place in self._writers:
            if self._node is None:  # code between units, which every rank runs
                del self._writers[place]
            else:
                self._writers[place] = self._node

    def _original(self, item: Any) -> Any:
        """The object that a copy stands for; any other itself."""
        return self._stand_ins.get(id(item), (None, item))[1]

    def _read(self, writer: int, item: Any, key: str) -> None:
        """An attribute is read that a node has written."""
        if writer == self._node:
            return
        own = self._node is not None and self._units[writer] is self._units[self._node]
        if not (own and isinstance(item, nn.Module)):
            self._on_read(writer, key)

    def forget(self) -> None:
        """Leaves classes and objects as they were."""
        self._watch.forget()
        for noted in (self._writers, self._units, self._unwatched, self._keep_alive):
            noted.clear()
