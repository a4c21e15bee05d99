"""What attributes of modules hold at one moment, to be there again at another."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.torch.pytorch.container_content import ABSENT

__all__ = ["DICTIONARIES", "AttributeContent", "called_as_now", "held_again", "namespace_of"]

DICTIONARIES = frozenset({dict, OrderedDict, defaultdict})
"""Others may do things when they are read."""


def namespace_of(holder: Any) -> dict[Any, Any]:
    """The attributes of a module or an object; a dictionary itself."""
    found: dict[Any, Any] = holder if type(holder) in DICTIONARIES else vars(holder)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class AttributeContent:
    """The object that an attribute of a module holds; not what is in it.

    Attributes:
        module: whose attribute it is.
        key: its name.
        value: what it holds.
    """

    module: nn.Module
    key: str
    value: Any

    @classmethod
    def of(cls, module: nn.Module, key: str) -> "AttributeContent":
        """What is there now."""
        return cls(module, key, vars(module).get(key, ABSENT))

    @property
    def is_there(self) -> bool:
        """Whether the module holds it."""
        return vars(self.module).get(self.key, ABSENT) is self.value

    def put(self) -> None:
        """Has the module hold it."""
        if self.value is ABSENT:
            vars(self.module).pop(self.key, None)
        else:
            vars(self.module)[self.key] = self.value


@contextmanager
def held_again(contents: Sequence[AttributeContent]) -> Iterator[None]:
    """Has the modules hold these; puts back what was there, where nothing else was written."""
    before = [AttributeContent.of(content.module, content.key) for content in contents]
    for content in contents:
        content.put()
    try:
        yield
    finally:
        for content, other in zip(contents, before, strict=True):
            if content.is_there:
                other.put()


def called_as_now(call: Callable[..., Any], places: Sequence[tuple[nn.Module, str]]) -> Callable[..., Any]:
    """A call that finds in these attributes what is there now, whenever it is made.

    Args:
        call: the call.
        places: (module, name of the attribute); one that holds a tensor with a graph is left out, which
            would be kept for long.
    """
    contents = [AttributeContent.of(module, key) for module, key in places]
    contents = [c for c in contents if not (isinstance(c.value, Tensor) and c.value.requires_grad)]
    if not contents:
        return call

    def called(*args: Any, **kwargs: Any) -> Any:
        with held_again(contents):
            return call(*args, **kwargs)

    return called
