"""Records what Python finds out about numbers among the arguments of a traced step function.

A step number is another one in every step, and Python may do anything with it. Were each a new trace, every
step would take as long as the first. So a trace that differs from an earlier one in its numbers alone gets
objects in their place which take note of what is asked of them::

    step % 100 == 0       computed, and compared: False          holds for 1 to 99, not for 100
    losses[step]          Python wants the number itself         holds for this step alone
    loss * weight         so does an operation                   holds for this weight, and any step

A trace holds for all numbers with the same answers, and with the same values where a number itself was wanted
(`NumberPath`): that is found out by computing again, without Python's code.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.torch.pytorch.tree import Structure

_MOST_STEPS = 256  # computing again takes time, too
_NO_NUMBERS = frozenset({type(None), str, bytes})


class NumberMatters(BaseException):
    """Leaves a step function that is traced, where too much is asked of its numbers."""


def is_number(item: Any) -> bool:
    """Whether it is an integer or a float, and no truth value."""
    return type(item) is int or type(item) is float


def numbers_among(items: Sequence[Any], structure: Structure) -> list[bool]:
    """Of each leaf of arguments, whether it is a number that may be watched."""
    if not any(map(is_number, items)):
        return [False] * len(items)
    return [
        is_number(item) and plain for item, plain in zip(items, structure.in_plain_containers(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class NumberPath:
    """The computations on the numbers of a trace.

    Attributes:
        positions: of the numbers among the leaves of the arguments.
        steps: in order, an operator, its operands, and the truth value that it gave, or the type of number.
            An operand is (place,): the number of a position or a step, counted together; or (type, constant).
        bound: place -> the number there, which was wanted itself.
    """

    positions: tuple[int, ...]
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], bool | type], ...]
    bound: Mapping[int, Any]

    @property
    def is_free(self) -> bool:
        """Whether it holds for other numbers, wherever they are."""
        return not self.bound

    def taken_by(self, items: Sequence[Any]) -> bool:
        """Whether other arguments give the same answers."""
        found = [items[position] for position in self.positions]
        try:
            for function, operands, expected in self.steps:
                found.append(function(*(found[o[0]] if len(o) == 1 else o[1] for o in operands)))
                if _answer(found[-1]) is not expected:
                    return False
        except Exception:
            return False  # the trace that follows raises it in the user's own code
        return all(repr(found[place]) == repr(number) for place, number in self.bound.items())


def _answer(found: Any) -> bool | type:
    return found if type(found) is bool else type(found)


class NumberReads:
    """Watches numbers during one trace.

    Attributes:
        matter: too much was asked. (Code may have gone on: ``except:`` catches everything.)
    """

    def __init__(self) -> None:
        self.matter = False
        self._positions: list[int] = []
        self._steps: dict[tuple[Any, ...], tuple[int, bool | type]] = {}  # what -> its place, the answer
        self._bound: dict[int, Any] = {}
        self._has_ended = False

    def watched(self, items: Sequence[Any], structure: Structure) -> list[Any]:
        """Puts watched numbers in place of numbers that may be watched."""
        may_be = numbers_among(items, structure)
        self._positions = [position for position, found in enumerate(may_be) if found]
        watched = list(items)
        for place, position in enumerate(self._positions):
            watched[position] = WatchedNumber(items[position], place, self)
        return watched

    def note(self, function: Callable[..., Any], operands: Sequence[Any], result: Any) -> int:
        """Something was computed, or asked; gives its place (see `NumberPath`)."""
        of = tuple((o._place,) if type(o) is WatchedNumber else (type(o), o) for o in operands)
        place = len(self._positions) + len(self._steps)
        place, _ = self._steps.setdefault((function, of), (place, _answer(result)))
        if len(self._steps) > _MOST_STEPS:
            self._give_up()
        return place

    def bind(self, place: int, number: Any) -> None:
        """A number itself is wanted: the trace holds for it alone."""
        if not self._has_ended:
            self._bound[place] = number

    def _give_up(self) -> None:
        if not self._has_ended:
            self.matter = True
            raise NumberMatters

    def path(self) -> NumberPath | None:
        """What the trace asked of the numbers, once, at its end; None if it wanted each itself."""
        self._has_ended = True
        if all(place in self._bound for place in range(len(self._positions))):
            return None
        steps = tuple((function, of, answer) for (function, of), (_, answer) in self._steps.items())
        return NumberPath(tuple(self._positions), steps, dict(self._bound))


def plain_numbers(items: list[Any]) -> list[Any] | None:
    """Arguments of torch functions and units, whose numbers are wanted themselves; None without any."""
    found = [_plain(item) for item in items]
    return None if all(a is b for a, b in zip(found, items, strict=True)) else found


def _plain(item: Any) -> Any:
    if isinstance(item, slice):
        parts = (item.start, item.stop, item.step)
        return slice(*map(_plain, parts)) if any(type(part) is WatchedNumber for part in parts) else item
    return item.plain() if type(item) is WatchedNumber else item


class WatchedNumber:
    """Behaves as a number, and takes note of what is asked of it.

    It is none of Python's own kinds of numbers: these give their value to lists and ranges unasked.
    """

    __slots__ = ("_place", "_reads", "_value")

    def __init__(self, value: Any, place: int, reads: NumberReads):
        self._value = value
        self._place = place
        self._reads = reads

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance()
        return type(self._value)

    def plain(self) -> Any:
        self._reads.bind(self._place, self._value)
        return self._value

    def __bool__(self) -> bool:
        return bool(_computed(operator.truth, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain(), name)

    def __reduce__(self) -> Any:
        return type(self._value), (self.plain(),)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.plain(), digits)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


def _computed(function: Callable[..., Any], *operands: Any) -> Any:
    reads = next(operand._reads for operand in operands if type(operand) is WatchedNumber)
    values = [operand._value if type(operand) is WatchedNumber else operand for operand in operands]
    if not all(is_number(value) or type(value) is bool for value in values):
        if function in (operator.eq, operator.ne) and type(values[1]) in _NO_NUMBERS:
            return function is operator.ne
        return function(*map(_plain, operands))
    try:
        result = function(*values)
    except Exception:
        return function(*map(_plain, operands))
    if type(result) is bool:
        reads.note(function, operands, result)
    elif is_number(result):
        return WatchedNumber(result, reads.note(function, operands, result), reads)
    else:
        return function(*map(_plain, operands))
    return result


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: _computed(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: _computed(function, other, self)


def _of_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(self.plain(), *others)


_BINARY = "add sub mul floordiv truediv mod and_ or_ xor lshift rshift".split()
for _name, _function in ({name: getattr(operator, name) for name in _BINARY} | {"pow": pow}).items():
    setattr(WatchedNumber, f"__{_name.strip('_')}__", _forward(_function))
    setattr(WatchedNumber, f"__r{_name.strip('_')}__", _reflected(_function))
for _name in "neg pos abs invert lt le eq ne gt ge".split():
    setattr(WatchedNumber, f"__{_name}__", _forward(getattr(operator, _name)))
for _name, _function in (
    *(("index", operator.index), ("int", int), ("float", float), ("complex", complex), ("hash", hash)),
    *(("str", str), ("repr", repr), ("format", format)),
    *(("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)),
):
    setattr(WatchedNumber, f"__{_name}__", _of_plain(_function))
