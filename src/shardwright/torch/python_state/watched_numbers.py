"""What Python finds out about numbers among the arguments of a step function, while it is traced.

A step number is another one in every step, and Python may do anything with it. Were each a new trace, every
step would take as long as the first. So a trace that differs from an earlier one in its numbers alone gets
objects in their place which take note of what is asked of them::

    step % 100 == 0       computed, and compared: False          holds for 1 to 99, not for 100
    losses[step]          Python wants the number itself         holds for this number alone

A trace that only computes with numbers and compares them holds for all numbers with the same answers
(`NumberPath`): that is found out by asking again, without Python's code. One that wants a number itself is
given up (`NumberMatters`), and made again with the number.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from shardwright.torch.pytorch.tree import Structure

__all__ = ["NumberMatters", "NumberPath", "NumberReads", "WatchedNumber", "note_used", "numbers_among"]

_Number: TypeAlias = int | float

_MOST_ANSWERS = 256  # asking costs time, too
_LONGEST = 32  # operators in an expression
_NO_NUMBERS = frozenset({type(None), str, bytes})
_MAY_FAIL = frozenset(
    {operator.floordiv, operator.truediv, operator.mod, operator.lshift, operator.rshift, operator.mul, pow}
)


class NumberMatters(BaseException):
    """Leaves a step function that is traced, where it wants a number itself."""


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
class _Argument:
    """A number as it was passed.

    Attributes:
        position: among the leaves of the step function's arguments.
    """

    position: int
    length: ClassVar[int] = 0

    def of(self, items: Sequence[Any]) -> Any:
        return items[self.position]


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any
    length: ClassVar[int] = 0

    def of(self, items: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class _Computed:
    """An operator, applied to other numbers.

    Attributes:
        operator: what is computed.
        operands: of what.
        length: operators in all.
    """

    operator: Callable[..., Any]
    operands: tuple[Any, ...]
    length: int

    def of(self, items: Sequence[Any]) -> Any:
        return self.operator(*(operand.of(items) for operand in self.operands))


_Expression: TypeAlias = _Argument | _Constant | _Computed


@dataclass(frozen=True, slots=True)
class NumberPath:
    """What was asked of the numbers of a trace.

    Attributes:
        answers: (what was computed of them, the truth value that it had; None if it had only to succeed).
    """

    answers: tuple[tuple[_Expression, bool | None], ...]

    def taken_by(self, items: Sequence[Any]) -> bool:
        """Whether other arguments give the same answers.

        Args:
            items: leaves of the arguments, with numbers of the same types at the same places.
        """
        try:
            return all(_agrees(expression.of(items), answer) for expression, answer in self.answers)
        except Exception:
            return False  # the trace that follows raises it in the user's own code


def _agrees(found: Any, answer: bool | None) -> bool:
    return answer is None or bool(found) == answer


class NumberReads:
    """Watches numbers during one trace.

    Attributes:
        matter: a number itself was wanted. (Code may have gone on: ``except:`` catches everything.)
    """

    def __init__(self) -> None:
        self.matter = False
        self._answers: dict[tuple[_Expression, bool | None], None] = {}
        self._has_ended = False

    def watched(self, items: Sequence[Any], structure: Structure) -> list[Any]:
        """Puts watched numbers in place of numbers that may be watched.

        Args:
            items: leaves of the arguments.
            structure: theirs.
        """
        return [
            WatchedNumber(item, _Argument(position), self) if may_be else item
            for position, (item, may_be) in enumerate(
                zip(items, numbers_among(items, structure), strict=True)
            )
        ]

    def note(self, expression: _Expression, answer: bool | None) -> None:
        """A number was asked a question, or something was computed of it that may fail."""
        self._answers[expression, answer] = None
        if len(self._answers) > _MOST_ANSWERS:
            self.note_used()

    def note_used(self) -> None:
        """A number itself is wanted.

        Raises:
            NumberMatters: during the trace.
        """
        if not self._has_ended:
            self.matter = True
            raise NumberMatters

    def path(self) -> NumberPath:
        """What was asked of the numbers; to be called once, at the end of the trace."""
        self._has_ended = True
        return NumberPath(tuple(self._answers))


def note_used(items: Iterable[Any]) -> None:
    """Torch functions and units get these arguments: what they make of numbers is not followed."""
    for item in items:
        parts = (item.start, item.stop, item.step) if isinstance(item, slice) else (item,)
        for part in parts:
            if type(part) is WatchedNumber:
                part.plain()


class WatchedNumber:
    """Behaves as a number, and takes note of what is asked of it.

    It is none of Python's own kinds of numbers: these give their value to lists and ranges unasked.
    """

    __slots__ = ("_expression", "_reads", "_value")

    def __init__(self, value: _Number, expression: _Expression, reads: NumberReads):
        self._value = value
        self._expression = expression
        self._reads = reads

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance()
        return type(self._value)

    def plain(self) -> _Number:
        """The number itself."""
        self._reads.note_used()
        return self._value

    def __bool__(self) -> bool:
        answer = bool(self._value)
        self._reads.note(self._expression, answer)
        return answer

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


def _parts(item: Any) -> tuple[Any, _Expression] | None:
    """An operand and where it comes from; None for what is no number."""
    if type(item) is WatchedNumber:
        return item._value, item._expression
    return (item, _Constant(item)) if is_number(item) or type(item) is bool else None


def _computed(function: Callable[..., Any], *operands: Any) -> Any:
    found = [_parts(operand) for operand in operands]
    watched = next(operand for operand in operands if type(operand) is WatchedNumber)
    known = [parts for parts in found if parts is not None]
    if len(known) < len(found):
        if function in (operator.eq, operator.ne) and type(operands[1]) in _NO_NUMBERS:
            return function is operator.ne
        watched.plain()
        return function(*(each._value if type(each) is WatchedNumber else each for each in operands))
    try:
        result = function(*(value for value, _ in known))
    except Exception:
        watched.plain()
        raise
    operands_of = tuple(where for _, where in known)
    expression = _Computed(function, operands_of, 1 + sum(each.length for each in operands_of))
    if expression.length > _LONGEST:
        watched.plain()
    if function in _MAY_FAIL:
        watched._reads.note(expression, None)
    if type(result) is bool:
        watched._reads.note(expression, result)
    elif is_number(result):
        return WatchedNumber(result, expression, watched._reads)
    else:
        watched.plain()
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
