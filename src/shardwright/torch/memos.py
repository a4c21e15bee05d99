"""What code between units computes once and keeps: tables of positions, masks, in an attribute or a buffer.

::

    if self.table is None or len(self.table) < length:     # the first microbatch comes by here, others do not
        self.table = torch.arange(length) / self.base
    x = x + self.table[:length]

So the trace of a microbatch that fills such a *memo* does not hold for the next one. The step function is
traced again with what the first trace left. If that leaves it alone, all microbatches find it filled, as they
would from the second one on in a plain loop. What depends on values of the batch, on random numbers or on
what units compute is no memo.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.attribute_use import Place
from shardwright.torch.tree import leaves

__all__ = ["Memo", "Memos", "filled"]

_ABSENT: Any = object()
_CONTAINERS = (list, dict, set)
_PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, eq=False)
class Memo:
    """The content of an attribute, or buffer, of a module.

    Attributes:
        module: whose it is.
        key: its name.
        is_buffer: it is registered as a buffer.
        persistent: and belongs to the state of the module.
        value: what it holds.
        inside: what is in that, if it is a container.
    """

    module: nn.Module
    key: str
    is_buffer: bool
    persistent: bool
    value: Any
    inside: Any

    @classmethod
    def of(cls, module: nn.Module, key: str, *, is_buffer: bool) -> "Memo":
        """What is there now."""
        value = (module._buffers if is_buffer else vars(module)).get(key, _ABSENT)
        inside = value.copy() if type(value) in _CONTAINERS else None
        persistent = key not in module._non_persistent_buffers_set
        return cls(module, key, is_buffer, persistent, value, inside)

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.module, self.key

    def is_there(self) -> bool:
        """Whether the module has it, and not something new."""
        now = Memo.of(self.module, self.key, is_buffer=self.is_buffer)
        return now.value is self.value and _same_inside(now.inside, self.inside)

    def fill(self) -> None:
        """Puts it there."""
        slots: dict[str, Any] = self.module._buffers if self.is_buffer else vars(self.module)
        if self.value is _ABSENT:
            slots.pop(self.key, None)
            return
        slots[self.key] = self.value
        if self.is_buffer:
            change = set.discard if self.persistent else set.add
            change(self.module._non_persistent_buffers_set, self.key)
        if self.inside is not None:
            self.value.clear()
            if isinstance(self.value, list):
                self.value.extend(self.inside)
            else:
                self.value.update(self.inside)

    def is_fixed(self, depends: Callable[[Tensor], bool]) -> bool:
        """Whether it is the same for any batch of these shapes.

        Args:
            depends: whether a tensor depends on values of the batch, on random numbers or on units.
        """
        return all(
            type(item) is Tensor and not item.requires_grad and not depends(item)
            if isinstance(item, Tensor)
            else isinstance(item, _PLAIN)
            for item in leaves(self.value if self.inside is None else self.inside)
        )


def _same_inside(one: Any, other: Any) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one is other
    if isinstance(one, dict):
        return all(key in other and other[key] is item for key, item in one.items())
    if isinstance(one, list):
        return all(a is b for a, b in zip(one, other, strict=True))
    return bool(one == other)


@contextmanager
def filled(memos: Sequence[Memo]) -> Iterator[None]:
    """Has the modules hold these; puts back what was there, where nothing else was written."""
    before = [Memo.of(memo.module, memo.key, is_buffer=memo.is_buffer) for memo in memos]
    for memo in memos:
        memo.fill()
    try:
        yield
    finally:
        for memo, other in zip(memos, before, strict=True):
            if memo.is_there():
                other.fill()


class Memos:
    """All memos of a model, for programs that were traced with different contents (another length)."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, str], Memo] = {}

    def of_trace(self, filled_there: Iterable[Memo]) -> tuple[Memo, ...]:
        """What a new program goes by: what its trace found, filled for it or there anyway.

        Args:
            filled_there: what was filled for it; not there now.
        """
        own = {(id(memo.module), memo.key): memo for memo in filled_there}
        now = {
            key: Memo.of(m.module, m.key, is_buffer=m.is_buffer) for key, m in {**self._first, **own}.items()
        }
        self._first = {**now, **self._first}
        return tuple({**now, **own}.values())

    def of_program(self, known: Iterable[Memo]) -> list[Memo]:
        """What a microbatch goes by whose program was made with these; of others, what was there then."""
        own = {(id(memo.module), memo.key): memo for memo in known}
        return list({**self._first, **own}.values())
