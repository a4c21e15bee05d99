"""The programs of a rank, by the microbatches that they hold for."""

import logging
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.torch.batch import Arguments
from shardwright.torch.path import Path
from shardwright.torch.program import Program
from shardwright.torch.recording import Trace
from shardwright.torch.tree import flatten

log = logging.getLogger(__name__)

__all__ = ["ProgramCache", "signature_of"]

# A path that is never taken twice (a length that Python reads) must not fill the memory. Nor must arguments
# that are others in every step (a step number).
_PATHS_KEPT = 32
_SIGNATURES_KEPT = 512
_NUMBERS_TOLD = 8

_BY_VALUE = frozenset(
    {type(None), bool, int, float, complex, slice, type(Ellipsis)}
    | {torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def signature_of(part: Arguments) -> Hashable:
    """Equal for microbatches that differ in the values of their tensors alone."""
    items, structure = flatten(part)
    return structure.key, tuple(_signature_of_leaf(item) for item in items)


def _signature_of_leaf(item: Any) -> Hashable:
    if isinstance(item, Tensor):
        # Views of other strides lie in other places of the memory; those of a contiguous one are known.
        packed = item.layout is not torch.strided or item.is_contiguous()
        stride = None if packed else item.stride()
        return tuple(item.shape), item.dtype, item.requires_grad, stride
    if type(item) in _BY_VALUE:
        return type(item), repr(item)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
    return (type(item), item) if type(item) in (str, bytes) else _Same(item)


class _Same:
    """Equal for the same object, while it lives: its identity may be another's later."""

    __slots__ = ("_hash", "_item")

    def __init__(self, item: Any):
        self._hash = id(item)
        self._item: Callable[[], Any]
        try:
            self._item = weakref.ref(item)
        except TypeError:
            self._item = lambda: item

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        item = self._item()
        return item is not None and item is other._item()


@dataclass(frozen=True, slots=True)
class _Entry:
    program: Program
    path: Path | None

    def holds_for(self, part: Arguments) -> bool:
        return self.path is None or self.path.taken_by(part)


class _NumbersGiven:
    """Tells of a step number among the arguments, which makes every step another one to Python."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[list[str]]] = {}  # signatures but for numbers -> the numbers
        self._warned = False

    def note(self, signature: Hashable) -> None:
        """A signature is new."""
        numbers: list[str] = []
        others = _without_numbers(signature, numbers)
        if self._warned or not numbers:
            return
        seen = self._seen.setdefault(others, [])
        if numbers in seen:
            return  # it was known before, and had to go
        seen.append(numbers)
        while len(self._seen) > _SIGNATURES_KEPT:
            del self._seen[next(iter(self._seen))]
        if len(seen) == _NUMBERS_TOLD:
            self._warned = True
            self._seen.clear()
            changed = next(pair for pair in zip(*seen, strict=True) if len(set(pair)) > 1)
            log.warning(
                "The step function was traced %d times, once for each number among its arguments (%s): "
                "Python may do anything with a number. If it changes in every step, as a step count does, "
                "pass a tensor (torch.tensor(number)) to compute with, or keep it out of the arguments.",
                _NUMBERS_TOLD,
                ", ".join(changed),
            )


def _without_numbers(signature: Hashable, numbers: list[str]) -> Hashable:
    """A signature in which numbers are left out; these are appended to a list."""
    if not isinstance(signature, tuple):
        return signature
    if len(signature) == 2 and signature[0] in (int, float):
        kind: Hashable = signature[0]
        numbers.append(signature[1])
        return kind
    return tuple(_without_numbers(part, numbers) for part in signature)


class ProgramCache:
    """Programs of microbatches of equal signature, one for each path that was taken so far.

    A program holds for its path alone, even if another one has the same graph: values that Python read may
    be in it, as the place of a view, the size of a random draw, or a number that a unit passes on.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, list[_Entry]] = {}
        self._numbers = _NumbersGiven()
        self._warned = False

    def find(self, signature: Hashable, part: Arguments) -> Program | None:
        """The program of a microbatch; None if it must be traced."""
        entries = self._entries.pop(signature, None)
        if entries is None:
            return None
        self._entries[signature] = entries  # the signature used last is the last one to go
        for position, entry in enumerate(entries):
            if entry.holds_for(part):
                entries.insert(0, entries.pop(position))  # the next microbatch is tried on it first
                return entry.program
        return None

    def keep(self, signature: Hashable, trace: Trace, program: Program) -> None:
        """Notes the program of a trace, for all microbatches that take its path."""
        if trace.reads_data and trace.path is None:
            if not self._warned:
                log.warning(
                    "Every microbatch is traced again: Python reads values of the batch in a way that cannot "
                    "be followed (random numbers, NumPy arrays, changes of what a tensor's memory is)."
                )
            self._warned = True
            return
        if signature not in self._entries:
            self._numbers.note(signature)
        entries = self._entries.setdefault(signature, [])
        entries.insert(0, _Entry(program, trace.path))
        del entries[_PATHS_KEPT:]
        while len(self._entries) > _SIGNATURES_KEPT:
            del self._entries[next(iter(self._entries))]
