"""What a call of a unit can get at: modules and objects with attributes, and the containers they hold."""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shardwright.torch.python_state.left_behind import is_plain_object
from shardwright.torch.python_state.snapshot import entries_of
from shardwright.torch.python_state.watched_containers import WatchedDict, WatchedList
from shardwright.torch.pytorch.module_tree import OF_EVERY_MODULE

__all__ = ["Reach", "own_attributes"]


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
