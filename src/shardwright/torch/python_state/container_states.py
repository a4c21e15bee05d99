"""Lists, dictionaries and dataclasses that several units can get at: a list of losses, a count of blocks.

Each rank has such a container of its own, and only the rank of a unit sees what the unit does to it::

    info["depth"] += 1          a number: whoever gets at `info` later may look at it
    feats.append(y)             a tensor: whoever is given `feats` later and computes with it

So a unit that gets at a container in which another one has changed a number shares a stage with that one,
whether it looks there or not. Tensors in containers that modules hold are seen where they are used (see
`hidden_inputs`). Tests alone need this so far: of 141 architectures none counts in a
container, and the layers of a cache are objects (see `object_states`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from shardwright.torch.python_state.snapshot import entries_of, put_entry
from shardwright.torch.pytorch.container_content import ABSENT, PLAIN, is_same
from shardwright.torch.pytorch.tree import leaves

__all__ = ["ContainerStates", "containers_in"]

_Entries = dict[Any, Any]


class ContainerStates:
    """Knows which calls of units changed which containers.

    Args:
        on_use: called with a node that has changed what the call can get at.
        is_everywhere: tells of a tensor that is put there whether every rank makes it for itself.
        as_fake: gives a fake tensor for one that a call on random data has put into a copy.

    Attributes:
        tensors_held: id of a tensor in a container that the call can get at -> the node that put it there.
        tensors_given: the same for containers that it is given.
    """

    def __init__(
        self,
        on_use: Callable[[int], None],
        is_everywhere: Callable[[Tensor], bool],
        as_fake: Callable[[Tensor], Tensor],
    ):
        self._on_use = on_use
        self._is_everywhere = is_everywhere
        self._as_fake = as_fake
        self._writers: dict[int, set[int]] = {}  # id of a container -> nodes
        self._tensors: dict[int, dict[int, int]] = {}  # id of a container -> of a tensor in it -> node
        self._changed: dict[int, Any] = {}  # id of a container -> it
        self.tensors_held: dict[int, int] = {}
        self.tensors_given: dict[int, int] = {}
        self._before: list[tuple[Any, _Entries]] = []
        self._copies: list[tuple[Any, Any, _Entries]] = []  # a copy, what it stands for, what was in it

    def have_changed(self, containers: Iterable[Any]) -> bool:
        """Whether a call has changed one of these."""
        return any(id(container) in self._changed for container in containers)

    def enter(self, held: list[Any], given: list[Any]) -> None:
        """A call begins that can get at these containers, and is given those."""
        self.tensors_held, self.tensors_given = self._tensors_in(held), self._tensors_in(given)
        self._before = [(container, entries_of(container)) for container in (*held, *given)]
        for container, _ in self._before:
            for writer in self._writers.get(id(container), ()):
                self._on_use(writer)

    def _tensors_in(self, containers: list[Any]) -> dict[int, int]:
        return {key: node for each in containers for key, node in self._tensors.get(id(each), {}).items()}

    def stands_for(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """The call is given copies of containers, and what it does there is done to these, too."""
        self._copies += [(copy, container, entries_of(copy)) for copy, container in pairs]

    def leave(self, node: int) -> None:
        """The call has ended."""
        for copy, container, before in self._copies:
            self._do_again(container, before, entries_of(copy))
        for container, before in self._before:
            for _, old, now in _changes(before, entries_of(container)):
                self._changed[id(container)] = container
                if self._is_somewhere(now):
                    self._tensors.setdefault(id(container), {})[id(now)] = node
                if _is_plain(now) or _is_plain(old):
                    self._writers.setdefault(id(container), set()).add(node)
        self._before, self._copies = [], []

    def _is_somewhere(self, item: Any) -> bool:
        """Whether it is a tensor that not every rank has."""
        return isinstance(item, Tensor) and not self._is_everywhere(item)

    def _do_again(self, container: Any, before: _Entries, after: _Entries) -> None:
        """Changes a container as its copy was changed, where that is a number or a tensor."""
        for key, _, now in _changes(before, after):
            if self._is_somewhere(now) or _is_plain(now):
                item = self._as_fake(now) if isinstance(now, Tensor) else now
                if not isinstance(container, list):
                    put_entry(container, key, item)
                elif key < len(container):
                    container[key] = item
                else:
                    container.append(item)


def containers_in(tree: Any) -> Iterator[Any]:
    """The lists, dictionaries and dataclasses of a tree of arguments."""
    if type(tree) in (list, dict, tuple):
        if type(tree) is not tuple:
            yield tree
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from containers_in(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type) and hasattr(tree, "__dict__"):
        yield tree


def _changes(before: _Entries, now: _Entries) -> Iterator[tuple[Any, Any, Any]]:
    for key in {**before, **now}:
        old, new = before.get(key, ABSENT), now.get(key, ABSENT)
        if not is_same(old, new):
            yield key, old, new


def _is_plain(item: Any) -> bool:
    """Whether it is a number or the like, or a tuple with one."""
    return any(type(part) in PLAIN for part in (leaves(item) if type(item) is tuple else (item,)))
