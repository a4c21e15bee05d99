"""What attributes of modules hold at one moment, to be there again at another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["AttributeContent", "held_again"]

_ABSENT: Any = object()


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
        return cls(module, key, vars(module).get(key, _ABSENT))

    @property
    def is_there(self) -> bool:
        """Whether the module holds it."""
        return vars(self.module).get(self.key, _ABSENT) is self.value

    def put(self) -> None:
        """Has the module hold it."""
        if self.value is _ABSENT:
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
