"""What is in objects and containers that a model holds, to see what a step function changes there."""

from typing import Any

from torch import nn

from shardwright.torch.python_state.attribute_content import DICTIONARIES, namespace_of
from shardwright.torch.python_state.reachable import Reach
from shardwright.torch.pytorch.container_content import ABSENT, content_of, has_content, is_same

__all__ = ["HeldContent"]


class HeldContent:
    """Attributes of objects, and entries of dictionaries, at one moment; those of modules are seen elsewhere.

    Args:
        model: the whole model.
    """

    def __init__(self, model: nn.Module):
        reach = Reach([model])
        self._holders = [item for item in reach.objects if not isinstance(item, nn.Module)]
        self._holders += [item for item in reach.containers if type(item) in DICTIONARIES]
        self._before = [
            {key: (value, content_of(value)) for key, value in namespace_of(holder).items()}
            for holder in self._holders
        ]
        owners = {
            id(vars(item)): item for item in (*model.modules(), *self._holders) if hasattr(item, "__dict__")
        }
        self._lengths = [
            (owners.get(id(holder), holder), key, container, len(container))
            for holder, key, container in reach.slots
            if isinstance(holder, dict)
        ]
        self._grown: list[tuple[Any, Any]] = []

    def look(self) -> None:
        """Looks which containers have grown or shrunk, also those of modules: they may end as they began."""
        other = [length for length in self._lengths if len(length[2]) != length[3]]
        if other:
            self._grown += [(holder, key) for holder, key, *_ in other]
            self._lengths = [length for length in self._lengths if len(length[2]) == length[3]]

    @property
    def changed(self) -> list[tuple[Any, Any]]:
        """What is another object now, or a container that has, or had, other things in it: (holder, key)."""
        found = list(self._grown)
        for holder, before in zip(self._holders, self._before, strict=True):
            now = namespace_of(holder)
            for key in {**before, **now}:
                value, content = before.get(key, (ABSENT, None))
                held = now.get(key, ABSENT)
                if not is_same(held, value) or not has_content(held, content):
                    found.append((holder, key))
        return found
