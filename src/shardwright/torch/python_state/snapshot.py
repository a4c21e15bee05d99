"""Snapshots of holders' entries, to compare and restore."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.torch.pytorch.slots import (
    ABSENT,
    Slot,
    entries_of,
    inside_of,
    is_same,
    put_entries,
    put_entry,
    same_entries,
    versions_of,
)

__all__ = ["DICTIONARIES", "SlotContent", "Snapshot", "namespace_of", "snapshot_of"]

DICTIONARIES = frozenset({dict, OrderedDict, defaultdict})


def namespace_of(holder: Any) -> dict[Any, Any]:
    """The attributes of a module or an object; a dictionary itself."""
    found: dict[Any, Any] = holder if type(holder) in DICTIONARIES else vars(holder)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class SlotContent:
    """The content of one slot of a module, an object or a dictionary at one moment.

    Attributes:
        holder: the module, object or dictionary.
        key: the name of the attribute, or the key.
        inside: the entries of that, if it is a container.
        versions: how often tensors there have been changed in place.
    """

    holder: Any
    key: Any
    value: Any
    inside: dict[Any, Any] | None
    versions: tuple[int, ...]

    @classmethod
    def of(cls, holder: Any, key: Any) -> "SlotContent":
        """Takes the content of a slot as it is now."""
        value = namespace_of(holder).get(key, ABSENT)
        return cls(holder, key, value, inside_of(value), versions_of(value))

    @property
    def is_there(self) -> bool:
        """Whether the slot holds this object, whatever is in it by now."""
        return namespace_of(self.holder).get(self.key, ABSENT) is self.value

    def has_same(self, other: "SlotContent") -> bool:
        """Whether both are the same object with the same in it, or equal numbers or texts."""
        return is_same(self.value, other.value) and same_entries(self.inside, other.inside)

    def put(self) -> None:
        """Has the slot hold the object, with whatever is in it."""
        put_entry(namespace_of(self.holder), self.key, self.value)

    def put_with_inside(self) -> None:
        """Has the slot hold the object, and in it what was in it."""
        self.put()
        if self.inside is not None:
            put_entries(self.value, self.inside)


class Snapshot:
    """The entries of some holders, and the versions of tensors among these."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, dict[Any, Any]]] = []
        self._versions: list[tuple[Any, int]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._resized: set[int] = set()

    def add(self, holder: Any) -> dict[Any, Any]:
        """Takes note of a holder's entries, and returns them."""
        entries = entries_of(holder)
        self._before.append((holder, entries))
        tensors = (item for item in entries.values() if type(item) is Tensor and not item.is_inference())
        self._versions += [(tensor, tensor._version) for tensor in tensors]
        return entries

    def follow_size(self, container: Any) -> None:
        """Has `look` see whether a container has grown or shrunk: it may end as it began."""
        self._sizes.append((container, len(container)))

    def look(self) -> None:
        """To be called now and then."""
        resized = [id(container) for container, size in self._sizes if len(container) != size]
        if resized:
            self._resized.update(resized)
            self._sizes = [each for each in self._sizes if id(each[0]) not in self._resized]

    @property
    def changed(self) -> list[Slot]:
        """Slots that hold another object, or a container or a tensor that has changed."""
        touched = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        touched |= self._resized
        both = [(holder, before, entries_of(holder)) for holder, before in self._before]
        for holder, _, now in both:
            is_container = isinstance(holder, dict | list | set)
            if is_container and any(id(item) in touched for item in now.values()):
                touched.add(id(holder))
        touched |= {
            id(holder)
            for holder, before, now in both
            if isinstance(holder, dict | list | set) and not same_entries(now, before)
        }
        return [
            (holder, key)
            for holder, before, now in both
            for key in {**before, **now}
            if not is_same(before.get(key, ABSENT), now.get(key, ABSENT)) or id(now.get(key)) in touched
        ]

    @property
    def new_tensors(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Attributes of modules that hold another tensor."""
        return [
            (holder, key, item)
            for holder, before in self._before
            if isinstance(holder, nn.Module)
            for key, item in vars(holder).items()
            if isinstance(item, Tensor) and item is not before.get(key)
        ]

    def put_back(self) -> None:
        """Has every holder hold what it held."""
        for holder, entries in self._before:
            put_entries(holder, entries)

    def take_out(self, is_meant: Callable[[Any], bool]) -> None:
        """Puts back only what new items of some kind have displaced; other changes stay.

        A dictionary, an object or a class gets single slots back, a list, deque or set all that was in it:
        ``rows.append(loss); sizes.append(1)`` stay as long as each other.
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


def snapshot_of(module: nn.Module) -> Snapshot:
    """The attributes of a module and of all modules inside it, and containers among these."""
    found = Snapshot()
    for sub in module.modules():
        for item in found.add(sub).values():
            if isinstance(item, dict | list | set):
                found.add(item)
    return found
