"""Caches a rank's programs by the microbatches that they are valid for."""

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.torch.batch.batch import Batch
from shardwright.torch.program.program import Program
from shardwright.torch.python_state.watched_numbers import NumberPath, numbers_among
from shardwright.torch.tracing.path import Path
from shardwright.torch.tracing.trace_data import Trace

log = logging.getLogger(__name__)

# A path that is never taken twice (a length that Python reads) must not fill the memory. Nor must arguments
# that are others in every step (a step number).
_PATHS_KEPT = 32
_SIGNATURES_KEPT = 512
_NUMBERS_TOLD = 8
_TRIED_IN_VAIN = 4
_LARGEST_ARRAY = 4096  # bytes

_BY_VALUE = frozenset(
    {type(None), bool, int, float, complex, slice, type(Ellipsis)}
    | {torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def signature_of(part: Batch, *, but_numbers: bool = False) -> Hashable:
    """Equal for microbatches that differ in the values of their tensors alone."""
    items, structure = part.leaves, part.structure
    if but_numbers:
        numbers = numbers_among(items, structure)
        items = [type(item) if number else item for item, number in zip(items, numbers, strict=True)]
    return structure.key, tuple(_signature_of_leaf(item) for item in items)


def _signature_of_leaf(item: Any) -> Hashable:
    if isinstance(item, Tensor):
        # Views of other strides lie in other places of the memory; those of a contiguous one are known.
        packed = item.layout is not torch.strided or item.is_contiguous()
        stride = None if packed else item.stride()
        return tuple(item.shape), item.dtype, item.requires_grad, stride
    if type(item) is np.ndarray and item.nbytes <= _LARGEST_ARRAY and not item.dtype.hasobject:
        # Ranks that are sent the batch have another object in every step.
        return np.ndarray, item.shape, item.dtype.str, item.tobytes()
    if type(item) in _BY_VALUE:
        return type(item), repr(item)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
    return (type(item), item) if type(item) in (str, bytes) else _Same(item)


class Circumstances:
    """What a program depends on beside its microbatch; it is hashed once, and compared once a batch."""

    __slots__ = ("_hash", "key")

    def __init__(self, key: Hashable):
        self.key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Circumstances) and self.key == other.key


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
    path: Path
    numbers: NumberPath | None = None

    def holds_for(self, part: Batch) -> bool:
        if self.numbers is not None and not self.numbers.taken_by(part.leaves):
            return False
        return self.path.taken_by(part.leaves)


@dataclass(slots=True)
class _NumbersSeen:
    """The traces of microbatches that differ in their numbers alone.

    Attributes:
        traced: numbers of the first traces that hold for no others.
        num_watched: traces that were tried with watched numbers.
        num_general: those that hold for any numbers, and uses of others that hold for more than their own.
    """

    traced: dict[tuple[str, ...], None] = field(default_factory=dict)
    num_watched: int = 0
    num_general: int = 0


class ProgramCache:
    """Programs of microbatches of equal signature, one for each path that was taken so far.

    A program holds for its path alone, even if another one has the same graph: values that Python read may
    be in it, as the place of a view, the size of a random draw, or a number that a unit passes on.
    """

    def __init__(self, *, warns: bool = True) -> None:
        self._warns = warns
        self._entries: dict[Hashable, list[_Entry]] = {}
        self._general: dict[Hashable, list[_Entry]] = {}  # signatures but for numbers
        self._numbers: dict[Hashable, _NumbersSeen] = {}  # so are these
        self._warned = False
        self._warned_of_numbers = False

    def find_all(self, parts: Sequence[Batch], circumstances: Hashable) -> list[Program | None]:
        signatures: dict[int, Hashable] = {}
        found = []
        for part in parts:
            key = id(part.alike or part)
            if key not in signatures:
                signatures[key] = signature_of(part)
            found.append(self.find(part, circumstances, signatures[key]))
        return found

    def find(self, part: Batch, circumstances: Hashable, signature: Hashable | None = None) -> Program | None:
        found = _find(self._entries, (signature or signature_of(part), circumstances), part)
        if found is None and self._general:
            general = signature_of(part, but_numbers=True), circumstances
            found = _find(self._general, general, part)
            if found is not None:
                self._numbers[general].num_general += 1
        return found

    def watches_numbers(self, part: Batch, circumstances: Hashable) -> bool:
        """Whether the trace of a microbatch should find out for which other numbers it holds.

        Not at first, when nobody knows whether there will be others; and not where it was mostly in vain.
        """
        seen = self._numbers.get((signature_of(part, but_numbers=True), circumstances))
        numbers = _numbers_of(part)
        if seen is None or not numbers or seen.traced.keys() <= {numbers}:
            return False
        return seen.num_watched < _TRIED_IN_VAIN + 2 * seen.num_general

    def keep(
        self,
        part: Batch,
        circumstances: Hashable,
        trace: Trace,
        program: Program,
        *,
        watched: bool = False,
        numbers: NumberPath | None = None,
        where: str = "",
    ) -> None:
        """Keeps the program of a trace for all microbatches that take its path."""
        if trace.path is None:
            if self._warns and not self._warned:
                log.warning(
                    "Every microbatch is traced again: Python reads values of the batch in a way that cannot "
                    "be followed (random numbers, NumPy arrays, changes of what a tensor's memory is)."
                )
            self._warned = True
            return
        general = signature_of(part, but_numbers=True), circumstances
        seen = self._numbers.setdefault(general, _NumbersSeen())
        seen.num_watched += watched
        entry = _Entry(program, trace.path, numbers)
        if numbers is not None:
            seen.num_general += numbers.is_free
            _keep(self._general, general, entry)
        else:
            _keep(self._entries, (signature_of(part), circumstances), entry)
        if numbers is None or not numbers.is_free:
            self._note_numbers(seen, part, where)
        while len(self._numbers) > _SIGNATURES_KEPT:
            del self._numbers[next(iter(self._numbers))]

    def _note_numbers(self, seen: _NumbersSeen, part: Batch, where: str) -> None:
        """Warns of many traces that differ in numbers alone."""
        numbers = _numbers_of(part)
        if not numbers or numbers in seen.traced or len(seen.traced) == _NUMBERS_TOLD:
            return
        seen.traced[numbers] = None
        if len(seen.traced) == _NUMBERS_TOLD and self._warns and not self._warned_of_numbers:
            self._warned_of_numbers = True
            changed = next(pair for pair in zip(*seen.traced, strict=True) if len(set(pair)) > 1)
            log.warning(
                "The step function%s was traced %d times, once for each number among its arguments (%s): it "
                "hands the number to operations, modules or other code. A trace takes as long as several "
                "steps. If the number changes in every step, as a weight of a loss may do, pass a tensor "
                "(torch.tensor(number)).",
                f" at {where}" if where else "",
                _NUMBERS_TOLD,
                ", ".join(changed),
            )


def _numbers_of(part: Batch) -> tuple[str, ...]:
    found = zip(part.leaves, numbers_among(part.leaves, part.structure), strict=True)
    return tuple(repr(item) for item, number in found if number)


def _find(entries: dict[Hashable, list[_Entry]], signature: Hashable, part: Batch) -> Program | None:
    found = entries.pop(signature, None)
    if found is None:
        return None
    entries[signature] = found  # the signature used last is the last one to go
    for position, entry in enumerate(found):
        if entry.holds_for(part):
            found.insert(0, found.pop(position))  # the next microbatch is tried on it first
            return entry.program
    return None


def _keep(entries: dict[Hashable, list[_Entry]], signature: Hashable, entry: _Entry) -> None:
    known = entries.setdefault(signature, [])
    known.insert(0, entry)
    del known[_PATHS_KEPT:]
    while len(entries) > _SIGNATURES_KEPT:
        del entries[next(iter(entries))]
