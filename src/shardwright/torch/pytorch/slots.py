"""Slots: the places where Python objects hold others.

A *slot* is a holder and a key: a module or an object and the name of an attribute, a dictionary and a key, a
list and an index, a class and a name. A holder's *entries* are all its slots, as a dictionary. A subclass of
a container may run code when it is read (a mapping that imports what it names), so it is read as its base.
"""

from collections import OrderedDict, deque
from types import CellType, MemberDescriptorType
from typing import Any

from torch import Tensor

__all__ = [
    "ABSENT",
    "PLAIN",
    "Slot",
    "entries_of",
    "inside_of",
    "is_same",
    "put_entries",
    "put_entry",
    "same_entries",
    "slots_of",
    "versions_of",
]

Slot = tuple[Any, Any]
"""A holder, and the key of what it holds."""

ABSENT: Any = object()  # in place of an entry that is not there
PLAIN = frozenset({type(None), bool, int, float, str})  # what nothing can change


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
        return {item: item for item in set.__iter__(holder)}
    if isinstance(holder, CellType):
        try:
            return {"": holder.cell_contents}
        except ValueError:
            return {}
    held = {name: _get(slot, holder) for name, slot in slots_of(type(holder)).items()}
    namespace = vars(holder) if type(holder).__dictoffset__ else {}
    return {**namespace, **{name: item for name, item in held.items() if item is not ABSENT}}


def inside_of(value: Any) -> dict[Any, Any] | None:
    """The entries of a dictionary, list or set; None for anything else."""
    return entries_of(value) if isinstance(value, dict | list | set) else None


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
    """Has one slot hold something; `ABSENT` empties it, and takes the end off a list. Not for sets."""
    is_gone = value is ABSENT
    if isinstance(holder, dict):
        dict.pop(holder, key, None) if is_gone else dict.__setitem__(holder, key, value)
    elif isinstance(holder, list):
        list.__setitem__(holder, slice(key, None if is_gone else key + 1), () if is_gone else (value,))
    elif isinstance(holder, type):
        delattr(holder, key) if is_gone else setattr(holder, key, value)
    elif (slot := _Cell if isinstance(holder, CellType) else slots_of(type(holder)).get(key)) is not None:
        slot.__delete__(holder) if is_gone else slot.__set__(holder, value)
    else:
        put_entry(vars(holder), key, value)


_Cell: Any = CellType.cell_contents
_BASES = (OrderedDict, dict, list, deque, set)


def put_entries(holder: Any, entries: dict[Any, Any]) -> None:
    """Has a holder hold exactly this, dictionaries in this order; one that does may refuse writes."""
    now = entries_of(holder)
    if same_entries(now, entries):
        return
    base: Any = next((kind for kind in _BASES if isinstance(holder, kind)), None)
    if base is None:
        for key in {**now, **entries}:
            if now.get(key, ABSENT) is not entries.get(key, ABSENT):
                put_entry(holder, key, entries.get(key, ABSENT))
        return
    base.clear(holder)
    if issubclass(base, dict):
        for key, item in entries.items():
            base.__setitem__(holder, key, item)
    elif base is set:
        set.update(holder, entries)
    else:
        base.extend(holder, entries.values())


def is_same(one: Any, other: Any) -> bool:
    """Whether it is the same object, or the same number or text."""
    return one is other or (type(one) is type(other) and type(one) in PLAIN and bool(one == other))


def same_entries(one: dict[Any, Any] | None, other: dict[Any, Any] | None) -> bool:
    """Whether the same objects are held under the same keys, in the same order: hooks run in theirs."""
    if one is None or other is None:
        return one is other
    return list(one) == list(other) and all(one[key] is item for key, item in other.items())


def versions_of(value: Any) -> tuple[int, ...]:
    """How often tensors have been changed in place: a tensor, or those in a container."""
    inside = inside_of(value)
    items = (value,) if inside is None else inside.values()
    return tuple(item._version for item in items if type(item) is Tensor and not item.is_inference())
