"""What a call of a unit can get at: modules and objects with attributes, and the containers they hold."""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shardwright.torch.python_state.left_behind import is_plain_object
from shardwright.torch.python_state.snapshot import (
    DICTIONARIES,
    Slot,
    SlotContent,
    entries_of,
    namespace_of,
)
from shardwright.torch.python_state.watched_containers import WatchedDict, WatchedList
from shardwright.torch.pytorch.container_content import ABSENT
from shardwright.torch.pytorch.module_tree import OF_EVERY_MODULE

__all__ = ["HeldContent", "Reach", "own_attributes"]


class Reach:
    """Walks once through what a unit holds and is given.

    Args:
        roots: the unit, and leaves of its arguments.

    Attributes:
        objects: those with attributes of their own, each once; also modules of the user's own classes.
        containers: lists and dictionaries that they hold, each once.
        slots: where these are: (container or namespace, key, the container).
    """

    def __init__(self, roots: Sequence[Any]):
        self.objects: list[Any] = []
        self.containers: list[Any] = []
        self.slots: list[tuple[Any, Any, Any]] = []
        self._seen: set[int] = set()
        self._pending = list(roots)
        while self._pending and len(self._seen) < _MOST:
            self._visit(self._pending.pop())

    def _visit(self, item: Any) -> None:
        if isinstance(item, _WITHOUT_STATE) or id(item) in self._seen:
            return
        self._seen.add(id(item))
        if isinstance(item, nn.Module):
            for sub in item.modules():
                self._visit_attributes(sub, is_first=sub is item)
        elif type(item) in _CONTAINERS:  # others may do things when they are read
            entries = entries_of(item)
            if len(entries) <= _LONGEST:
                self.containers.append(item)
                self._hold(item, entries)
        elif type(item) is tuple:
            self._pending += item
        elif is_plain_object(item):
            self.objects.append(item)
            self._hold(vars(item), vars(item))

    def _visit_attributes(self, module: nn.Module, *, is_first: bool) -> None:
        if not is_first:
            if id(module) in self._seen:
                return
            self._seen.add(id(module))
        if is_plain_object(module):
            self.objects.append(module)
        self._hold(vars(module), own_attributes(module))

    def _hold(self, holder: Any, entries: dict[Any, Any]) -> None:
        self._pending += entries.values()
        self.slots += [(holder, key, item) for key, item in entries.items() if type(item) in _WATCHED]


def own_attributes(item: Any) -> dict[str, Any]:
    """The attributes of an object; of a module without parameters, modules inside it, and hooks."""
    if not isinstance(item, nn.Module):
        return dict(vars(item))
    return {key: value for key, value in vars(item).items() if key not in OF_EVERY_MODULE}


_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, WatchedDict, WatchedList})
_WATCHED = frozenset({dict, list})
_LONGEST, _MOST = 1_000, 10_000  # what is beyond is data
_WITHOUT_STATE = (Tensor, type, type(None), bool, int, float, complex, str, bytes)


class HeldContent:
    """What a step function changes in objects and containers that a model holds.

    Attributes of modules are seen elsewhere. Flags in configurations need it: ``config.problem_type``, which
    classifiers of Hugging Face set in their forward.

    Args:
        model: the whole model.
    """

    def __init__(self, model: nn.Module):
        reach = Reach([model])
        holders = [item for item in reach.objects if not isinstance(item, nn.Module)]
        holders += [item for item in reach.containers if type(item) in DICTIONARIES]
        self._before = [(holder, _contents_of(holder)) for holder in holders]
        owners = {id(vars(item)): item for item in (*model.modules(), *holders) if hasattr(item, "__dict__")}
        self._lengths = [
            (owners.get(id(holder), holder), key, container, len(container))
            for holder, key, container in reach.slots
            if isinstance(holder, dict)
        ]
        self._grown: list[Slot] = []

    def look(self) -> None:
        """Looks which containers have grown or shrunk, also those of modules: they may end as they began."""
        other = [length for length in self._lengths if len(length[2]) != length[3]]
        if other:
            self._grown += [(holder, key) for holder, key, *_ in other]
            self._lengths = [length for length in self._lengths if len(length[2]) == length[3]]

    @property
    def changed(self) -> list[Slot]:
        """What is another object now, or a container that has, or had, other things in it."""
        found = list(self._grown)
        for holder, before in self._before:
            for key in {**before, **namespace_of(holder)}:
                now = SlotContent.of(holder, key)
                if now.value is ABSENT or key not in before or not now.has_same(before[key]):
                    found.append((holder, key))
        return found


def _contents_of(holder: Any) -> dict[Any, SlotContent]:
    return {key: SlotContent.of(holder, key) for key in namespace_of(holder)}
