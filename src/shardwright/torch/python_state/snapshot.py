"""What modules, objects, containers, classes and closures hold at one moment, to be put back later.

A *slot* is a holder and a key: a module and the name of an attribute, a dictionary and a key, a list and an
index, a class and a name. A holder's *entries* are all its slots, as a dictionary.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, MemberDescriptorType
from typing import Any

import torch

from shardwright.torch.pytorch.container_content import (
    ABSENT,
    content_of,
    has_content,
    is_same,
    put_content,
    versions_of,
)

__all__ = [
    "CONTAINERS",
    "DICTIONARIES",
    "NOTHING_INSIDE",
    "Slot",
    "SlotContent",
    "Snapshot",
    "entries_of",
    "namespace_of",
    "put_entries",
    "put_entry",
    "slots_of",
]

Slot = tuple[Any, Any]
"""A module, an object or a dictionary, and the name of what is in it."""

DICTIONARIES = frozenset({dict, OrderedDict, defaultdict})

CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set})
"""Other kinds may do things when they are read."""

NOTHING_INSIDE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)


def entries_of(holder: Any) -> dict[Any, Any]:
    """The slots of a holder, with what they hold.

    >>> entries_of(["a", "b"])
    {0: 'a', 1: 'b'}
    """
    if isinstance(holder, dict):
        return dict(dict.items(holder))
    if isinstance(holder, list):
        return dict(enumerate(list.__iter__(holder)))
    if isinstance(holder, deque | tuple):
        return dict(enumerate(holder))
    if isinstance(holder, set):
        return {item: item for item in holder}
    if isinstance(holder, CellType):
        try:
            return {"": holder.cell_contents}
        except ValueError:
            return {}
    held = {name: _get(slot, holder) for name, slot in slots_of(type(holder)).items()}
    namespace = vars(holder) if type(holder).__dictoffset__ else {}
    return {**namespace, **{name: item for name, item in held.items() if item is not ABSENT}}


def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of the ``__slots__`` of a Python class, by name."""
    return {
        name: slot
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if type(slot) is MemberDescriptorType
    }


def _get(slot: Any, holder: Any) -> Any:
    try:
        return slot.__get__(holder)
    except AttributeError:
        return ABSENT


def put_entry(holder: Any, key: Any, value: Any) -> None:
    """Has one slot hold something; `ABSENT` empties it. Not for lists, deques and sets."""
    is_gone = value is ABSENT
    if isinstance(holder, dict):
        dict.pop(holder, key, None) if is_gone else dict.__setitem__(holder, key, value)
    elif isinstance(holder, type):
        delattr(holder, key) if is_gone else setattr(holder, key, value)
    elif (slot := _Cell if isinstance(holder, CellType) else slots_of(type(holder)).get(key)) is not None:
        slot.__delete__(holder) if is_gone else slot.__set__(holder, value)
    else:
        put_entry(vars(holder), key, value)


_Cell: Any = CellType.cell_contents


def put_entries(holder: Any, entries: dict[Any, Any]) -> None:
    """Has a holder hold exactly this, dictionaries in this order; one that does is left alone."""
    now = entries_of(holder)
    if list(now) == list(entries) and all(now[key] is item for key, item in entries.items()):
        return
    if isinstance(holder, dict | set):
        holder.clear()
        holder.update(entries)
    elif isinstance(holder, list | deque):
        holder.clear()
        holder.extend(entries.values())
    else:
        for key in {**now, **entries}:
            if now.get(key, ABSENT) is not entries.get(key, ABSENT):
                put_entry(holder, key, entries.get(key, ABSENT))


def namespace_of(holder: Any) -> dict[Any, Any]:
    """The attributes of a module or an object; a dictionary itself."""
    found: dict[Any, Any] = holder if type(holder) in DICTIONARIES else vars(holder)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class SlotContent:
    """What one slot of a module, an object or a dictionary holds at one moment.

    Attributes:
        holder: the module, object or dictionary.
        key: the name of the attribute, or the key.
        value: what it holds.
        inside: what is in that, if it is a container.
        versions: how often tensors there have been changed in place.
    """

    holder: Any
    key: Any
    value: Any
    inside: Any
    versions: tuple[int, ...]

    @classmethod
    def of(cls, holder: Any, key: Any) -> "SlotContent":
        """What is there now."""
        value = namespace_of(holder).get(key, ABSENT)
        return cls(holder, key, value, content_of(value), versions_of(value))

    @property
    def is_there(self) -> bool:
        """Whether the slot holds this object, whatever is in it by now."""
        return namespace_of(self.holder).get(self.key, ABSENT) is self.value

    def has_same(self, other: "SlotContent") -> bool:
        """Whether both are the same object with the same in it, or equal numbers or texts."""
        return is_same(self.value, other.value) and has_content(self.inside, other.inside)

    def put(self) -> None:
        """Has the slot hold the object, with whatever is in it."""
        put_entry(namespace_of(self.holder), self.key, self.value)

    def put_with_inside(self) -> None:
        """Has the slot hold the object, and in it what was in it."""
        self.put()
        if self.inside is not None:
            put_content(self.value, self.inside)


class Snapshot:
    """The entries of some holders."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, dict[Any, Any]]] = []

    def __len__(self) -> int:
        return len(self._before)

    def add(self, holder: Any) -> dict[Any, Any]:
        """Takes note of a holder's entries, and returns them."""
        entries = entries_of(holder)
        self._before.append((holder, entries))
        return entries

    def put_back(self) -> None:
        """Has every holder hold what it held."""
        for holder, entries in self._before:
            put_entries(holder, entries)

    def take_out(self, is_meant: Callable[[Any], bool]) -> None:
        """Puts back only what new items of some kind have displaced; other changes stay.

        A dictionary, an object or a class gets single slots back, a list, deque or set all that was in it:
        ``rows.append(loss); sizes.append(1)`` stay as long as each other.

        Args:
            is_meant: tells of an item that was not there whether it is of this kind.
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
