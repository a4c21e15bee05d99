"""Numbers that a step function reads of tensors that only one rank has: known when the step is over.

Scripts of other libraries read the loss in the step function itself, where every rank has it::

    loss = model(x, y)             on one rank
    model.backward(loss)
    return loss.item()             a number that is not known yet; a list of numbers, when the step returns

What is read is computed with, written into texts, and returned, but nothing can be decided by it. A text has
a placeholder until the step is over. Code of the model is not meant: a module that looks at values is placed
whole instead.

All ranks run the step function, so that each makes the same late values, in the same order. The tensors that
they were read of go to every rank with the results of the step.
"""

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from shardwright.errors import DeferredReadError
from shardwright.torch.source_line import user_line
from shardwright.torch.step_output import gather_outputs
from shardwright.torch.tree import map_tree

__all__ = [
    "LateValue",
    "WithLateValues",
    "gather_late_outputs",
    "in_code_of_model",
    "late_value",
    "reads_late",
]

_READERS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
    Tensor.numpy: lambda tensor: tensor.cpu().numpy(),
}

_UNKNOWN: Any = object()
_NUMBERS = itertools.count()
_MARK = "LateValue#"
_PLACEHOLDER = re.compile(_MARK + r"(\d+)\(known when the step has returned\)")


class LateValue:
    """What Python code reads of a tensor that may be on another rank.

    What is computed of it is a late value, too, until the step is over.

    Args:
        make: makes the value of the tensors that were read in the step, when all ranks have them.
    """

    __slots__ = ("_make", "_value")
    __array_ufunc__ = None  # numbers of NumPy leave it to this class what a sum is

    def __init__(self, make: Callable[[Sequence[Tensor]], Any]):
        self._make: Callable[[Sequence[Tensor]], Any] | None = make
        self._value = _UNKNOWN
        if (reads := _reads.get()) is not None:
            reads.values.append(self)

    def become_known(self, tensors: Sequence[Tensor]) -> None:
        """Takes its value; those that it is computed of have theirs.

        Args:
            tensors: that were read in the step.
        """
        assert self._make is not None
        self._value, self._make = self._make(tensors), None

    @property
    def known(self) -> Any:
        """The value.

        Raises:
            DeferredReadError: the step is not over.
        """
        if self._value is _UNKNOWN:
            self._refuse("its value")
        return self._value

    def _text(self, write: Callable[[Any], str]) -> str:
        if self._value is not _UNKNOWN:
            return write(self._value)
        number = next(_NUMBERS)
        if (reads := _reads.get()) is not None:
            reads.texts[number] = lambda: write(self._value)
        return f"{_MARK}{number}(known when the step has returned)"

    def _refuse(self, what: str) -> NoReturn:
        raise DeferredReadError(
            f"{user_line()}: {what} is asked for inside the step function, of something that was read of a "
            "tensor which only one rank has. It is known when the step has returned: return it, and decide "
            "by it there."
        )

    def __bool__(self) -> bool:
        return bool(self.known)

    def __float__(self) -> float:
        return float(self.known)

    def __int__(self) -> int:
        return int(self.known)

    def __index__(self) -> int:
        return operator.index(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.known)

    def __contains__(self, item: Any) -> bool:
        return item in self.known

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy

        return numpy.asarray(self.known, *args, **kwargs)

    def __lt__(self, other: Any) -> Any:
        return self.known < _plain(other)

    def __le__(self, other: Any) -> Any:
        return self.known <= _plain(other)

    def __gt__(self, other: Any) -> Any:
        return self.known > _plain(other)

    def __ge__(self, other: Any) -> Any:
        return self.known >= _plain(other)

    def __eq__(self, other: object) -> Any:
        return self.known == _plain(other)

    def __ne__(self, other: object) -> Any:
        return self.known != _plain(other)

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._value is _UNKNOWN:
            raise _AttributeRefusedError(
                f"{user_line()}: {name} of something that was read of a tensor which only one rank has is "
                "asked for inside the step function. It is known when the step has returned: return it."
            )
        return getattr(self._value, name)

    def __str__(self) -> str:
        return self._text(str)

    def __repr__(self) -> str:
        return self._text(repr)

    def __format__(self, format_spec: str) -> str:
        return self._text(lambda value: format(value, format_spec))


class _AttributeRefusedError(DeferredReadError, AttributeError):
    """Asked for an attribute, as a way to find out whether there is one."""


def _compute(function: Callable[..., Any], *operands: Any) -> Any:
    """What a function makes of late values and others, now or later."""
    for operand in operands:
        if isinstance(operand, Tensor):
            raise DeferredReadError(
                f"{user_line()}: {function.__name__} of a tensor, and of a number that was read of a tensor "
                "which only one rank has, inside the step function. Compute with the tensor itself "
                "(loss.detach() in the place of loss.item())."
            )
    if not any(isinstance(each, LateValue) and each._value is _UNKNOWN for each in operands):
        return function(*map(_plain, operands))
    return LateValue(lambda _: function(*map(_plain, operands)))


def _plain(operand: Any) -> Any:
    return operand.known if isinstance(operand, LateValue) else operand


def _define_arithmetic() -> None:
    """Gives `LateValue` the operators of numbers, and ``[]``."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
        function = getattr(operator, name)
        setattr(LateValue, f"__{name}__", functools.partialmethod(_operate, function))
        setattr(LateValue, f"__r{name}__", functools.partialmethod(_operate_reversed, function))
    others: dict[str, Callable[..., Any]] = {
        "abs": abs,
        "ceil": math.ceil,
        "divmod": divmod,
        "floor": math.floor,
        "getitem": operator.getitem,
        "neg": operator.neg,
        "pos": operator.pos,
        "round": round,
        "trunc": math.trunc,
    }
    for name, function in others.items():
        setattr(LateValue, f"__{name}__", functools.partialmethod(_operate, function))


def _operate(self: LateValue, function: Callable[..., Any], *others: Any) -> Any:
    return _compute(function, self, *others)


def _operate_reversed(self: LateValue, function: Callable[..., Any], other: Any) -> Any:
    return _compute(function, other, self)


_define_arithmetic()


@dataclass(slots=True, eq=False)
class _Reads:
    """What one call of a step function reads.

    Attributes:
        tensors: what is read.
        values: late values, each behind those that it is computed of.
        texts: by number, what takes the place of a placeholder.
    """

    tensors: list[Tensor] = field(default_factory=list)
    values: list[LateValue] = field(default_factory=list)
    texts: dict[int, Callable[[], str]] = field(default_factory=dict)


# Greenlets have contexts of their own, so that microbatches do not see each other's.
_in_step_code: ContextVar[bool] = ContextVar("_in_step_code", default=False)
_reads: ContextVar[_Reads | None] = ContextVar("_reads", default=None)


def reads_late(func: Any) -> Callable[[Tensor], Any] | None:
    """What makes a value of a tensor later, where the step function's own code reads it now; else None.

    Args:
        func: the torch function that is called.
    """
    return _READERS.get(func) if _in_step_code.get() else None


def late_value(tensor: Tensor, reader: Callable[[Tensor], Any]) -> LateValue:
    """The value of a tensor that may be on another rank.

    Args:
        tensor: it stays as it is.
        reader: makes of it what the code asked for.
    """
    reads = _reads.get()
    assert reads is not None
    place = len(reads.tensors)
    reads.tensors.append(tensor)
    return LateValue(lambda tensors: reader(tensors[place]))


@contextmanager
def in_code_of_model() -> Iterator[None]:
    """Inside, code of the model runs, whose reads are no late ones."""
    token = _in_step_code.set(False)
    try:
        yield
    finally:
        _in_step_code.reset(token)


class _Returned(NamedTuple):
    """What a call of a step function returns, and what goes to every rank with it."""

    result: Any
    reads: _Reads
    tensors: list[Tensor]


class WithLateValues:
    """A step function whose own code may read tensors that are on another rank.

    Args:
        function: the step function.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reads = _Reads()
        tokens = _in_step_code.set(True), _reads.set(reads)
        try:
            result = self._function(*args, **kwargs)
        finally:
            _in_step_code.reset(tokens[0])
            _reads.reset(tokens[1])
        return _Returned(result, reads, reads.tensors) if reads.tensors else result


def gather_late_outputs(results: Sequence[Any]) -> Any:
    """As `gather_outputs`, with what was read in the place of late values.

    Args:
        results: of a `WithLateValues`, by microbatch.
    """
    returned = [each for each in results if isinstance(each, _Returned)]
    if not returned:
        return gather_outputs(results)
    texts: dict[int, Callable[[], str]] = {}
    for each in returned:
        for value in each.reads.values:
            value.become_known(each.tensors)
        texts |= each.reads.texts
    gathered = gather_outputs([each.result if isinstance(each, _Returned) else each for each in results])
    return map_tree(lambda item: _filled_in(item, texts), gathered)


def _filled_in(item: Any, texts: dict[int, Callable[[], str]]) -> Any:
    if isinstance(item, LateValue):
        return item.known
    if not isinstance(item, str) or _MARK not in item:
        return item

    def now(placeholder: re.Match[str]) -> str:
        write = texts.get(int(placeholder[1]))
        return placeholder[0] if write is None else write()

    text = _PLACEHOLDER.sub(now, item)
    if _MARK in text:
        raise DeferredReadError(
            f"the step function returns the text {item[:100]!r}, which has a number that was not known when "
            "the text was cut, or one of an earlier step. Return the number, and make the text when the step "
            "has returned."
        )
    return text
