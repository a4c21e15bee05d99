"""Lists, dictionaries and dataclasses that units are given and change: a list of losses, a count of blocks.

Each rank has such a container of its own, and only the rank of a unit sees what the unit does to it::

    info["depth"] += 1          a number: whoever is given `info` later may look at it
    feats.append(y)             a tensor: whoever is given `feats` later and computes with it

So a unit that is given a container in which another one has changed a number shares a stage with that one,
whether it looks there or not. (Of 141 architectures none hands on such a container; blocks of the user's own
do, for their auxiliary losses. What modules and caches hold is looked at more closely, by `held_containers`.)
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from shardwright.torch.python_state.snapshot import entries_of
from shardwright.torch.pytorch.container_content import ABSENT, PLAIN, is_same
from shardwright.torch.pytorch.tree import leaves

__all__ = ["ContainerStates"]


class ContainerStates:
    """Knows which calls of units changed which containers among their arguments.

    Args:
        on_use: called with a node that has changed what the call is given.
        is_everywhere: tells of a tensor that is put there whether every rank makes it for itself.

    Attributes:
        tensors_given: id of a tensor in a container that the call is given -> the node that put it there.
    """

    def __init__(self, on_use: Callable[[int], None], is_everywhere: Callable[[Tensor], bool]):
        self._on_use = on_use
        self._is_everywhere = is_everywhere
        self._writers: dict[int, set[int]] = {}  # id of a container -> nodes that have changed a number
        self._tensors: dict[int, dict[int, int]] = {}  # id of a container -> of a tensor in it -> node
        self._changed: dict[int, Any] = {}  # id of a container -> it
        self._before: list[tuple[Any, dict[Any, Any]]] = []
        self.tensors_given: dict[int, int] = {}

    def have_changed(self, arguments: Any) -> bool:
        """Whether a call has changed a container among these."""
        return any(id(container) in self._changed for container in _containers_in(arguments))

    def enter(self, arguments: Any) -> None:
        """A call begins.

        Args:
            arguments: as the step function has them.
        """
        self._before = [(container, entries_of(container)) for container in _containers_in(arguments)]
        self.tensors_given = {}
        for container, _ in self._before:
            self.tensors_given |= self._tensors.get(id(container), {})
            for writer in self._writers.get(id(container), ()):
                self._on_use(writer)

    def leave(self, node: int) -> None:
        """The call has ended, and what it has done to its containers is done to those of the arguments."""
        for container, before in self._before:
            now = entries_of(container)
            for key in {**before, **now}:
                old, new = before.get(key, ABSENT), now.get(key, ABSENT)
                if is_same(old, new):
                    continue
                self._changed[id(container)] = container
                if isinstance(new, Tensor) and not self._is_everywhere(new):
                    self._tensors.setdefault(id(container), {})[id(new)] = node
                if _has_number(old) or _has_number(new):
                    self._writers.setdefault(id(container), set()).add(node)
        self._before = []


def _containers_in(tree: Any) -> Iterator[Any]:
    if type(tree) in (list, dict, tuple):
        if type(tree) is not tuple:
            yield tree
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers_in(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type) and hasattr(tree, "__dict__"):
        yield tree


def _has_number(item: Any) -> bool:
    """Whether it is a number or the like, or a tuple with one."""
    return any(type(part) in PLAIN for part in (leaves(item) if type(item) is tuple else (item,)))
