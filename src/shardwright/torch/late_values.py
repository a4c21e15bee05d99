"""Numbers that a step function reads of tensors that only one rank has: known when the step is over.

Scripts of other libraries read the loss in the step function itself, where every rank has it::

    loss = model(x, y)             on one rank
    model.backward(loss)
    return loss.item()             a number that is not known yet; a list of numbers, when the step returns

What is read is computed with, written into texts, and returned, but nothing can be decided by it. Code of the
model is not meant: a module that looks at values is placed whole instead.

All ranks run the step function, so that each reads the same, in the same order. The tensors that were read go
to every rank with the results of the step (`late_results`). What a rank computes of them is its own matter.
"""

import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.errors import DeferredReadError
from shardwright.torch.late_texts import LateText
from shardwright.torch.source_line import user_line

__all__ = ["LateValue", "Reads", "in_code_of_model", "is_unknown", "late_value", "reading", "reads_late"]

_READERS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
    Tensor.numpy: lambda tensor: tensor.cpu().numpy(),
}


class _Not(Enum):
    """In the place of a value; a copy of it is the same."""

    KNOWN = 0


class LateValue:
    """What Python code reads of a tensor that may be on another rank.

    What is computed of it is a late value, too, until the step is over. Then it does what its value does.

    Args:
        make: makes the value, when all ranks have the tensors that were read in the step.
    """

    __slots__ = ("_hash", "_line", "_make", "_value")
    __array_ufunc__ = None  # numbers of NumPy leave it to this class what a sum is

    def __init__(self, make: Callable[[], Any]):
        self._make: Callable[[], Any] | None = make
        self._value: Any = _Not.KNOWN
        self._line = user_line()
        self._hash: int | None = None
        if (reads := _reads.get()) is not None:
            reads.values.append(self)

    @property
    def is_known(self) -> bool:
        """Whether it has its value."""
        return self._make is None

    @property
    def known(self) -> Any:
        """The value.

        Raises:
            DeferredReadError: the step is not over.
        """
        if self._make is not None:
            try:
                self._value = self._make()
            except Exception as error:
                if not hasattr(error, "__notes__"):
                    error.add_note(f"This was to be computed at {self._line}, in a step function.")
                raise
            self._make = None
        return self._value

    def __len__(self) -> int:
        if isinstance(self.known, numbers.Number):
            raise TypeError(  # torch.tensor() asks each item of a list
                f"{self.known!r} has no len(). A number that was read in a step function becomes a plain one "
                "by float(), for a list of which torch.tensor() makes a tensor."
            )
        return len(self._value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy

        return numpy.asarray(self.known, *args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """For ``torch.tensor``: it is no number to PyTorch, which would ask for its length."""
        return torch.tensor(self.known).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return torch.tensor(self.known).__dlpack_device__()

    def __hash__(self) -> int:
        """It may be a key before it is known, and then stays what it was."""
        if self._hash is None:
            self._hash = hash(self._value) if self.is_known else object.__hash__(self)
        return self._hash

    def __copy__(self) -> "LateValue":
        return self

    def __deepcopy__(self, memo: Any) -> "LateValue":
        return self  # nothing changes it

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have the plain value."""
        value = self.known
        plain = isinstance(value, bool | float | int | list | str)
        return (type(value), (value,)) if plain else value.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self.is_known:
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

    def _text(self, write: Callable[[Any], str]) -> str:
        return write(self._value) if self.is_known else LateText(self, write)


numbers.Number.register(LateValue)  # for what keeps the numbers among several things; most are


class _AttributeRefusedError(DeferredReadError, AttributeError):
    """Asked for an attribute, as a way to find out whether there is one."""


def is_unknown(item: Any) -> bool:
    """Whether it is a late value, or a text of one, that is not known."""
    return isinstance(item, LateValue | LateText) and not item.is_known


def _compute(function: Callable[..., Any], *operands: Any) -> Any:
    """What a function makes of late values and others, now or later."""
    if not any(isinstance(each, LateValue) and not each.is_known for each in operands):
        return function(*map(_plain, operands))
    if any(isinstance(each, Tensor) for each in operands):
        raise DeferredReadError(
            f"{user_line()}: {function.__name__} of a tensor, and of a number that was read of a tensor "
            "which only one rank has, inside the step function. Compute with the tensor itself "
            "(loss.detach() in the place of loss.item())."
        )
    return LateValue(lambda: function(*map(_plain, operands)))


def _plain(operand: Any) -> Any:
    return operand.known if isinstance(operand, LateValue) else operand


def _define_operators() -> None:
    """Gives `LateValue` the operators of numbers and ``[]``, and what asks for a value at once."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
        function = getattr(operator, name)
        setattr(LateValue, f"__{name}__", functools.partialmethod(_operate, function))
        setattr(LateValue, f"__r{name}__", functools.partialmethod(_operate_reversed, function))
    computed: dict[str, Callable[..., Any]] = {
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
    for name, function in computed.items():
        setattr(LateValue, f"__{name}__", functools.partialmethod(_operate, function))
    asked: dict[str, Callable[..., Any]] = {"bool": bool, "float": float, "int": int, "iter": iter}
    for name in ("contains", "eq", "ge", "gt", "index", "le", "lt", "ne"):
        asked[name] = getattr(operator, name)
    for name, function in asked.items():
        setattr(LateValue, f"__{name}__", functools.partialmethod(_ask, function))


def _operate(self: LateValue, function: Callable[..., Any], *others: Any) -> Any:
    return _compute(function, self, *others)


def _operate_reversed(self: LateValue, function: Callable[..., Any], other: Any) -> Any:
    return _compute(function, other, self)


def _ask(self: LateValue, function: Callable[..., Any], *others: Any) -> Any:
    return function(self.known, *map(_plain, others))


_define_operators()


class Reads:
    """What one microbatch reads, or a trace.

    Attributes:
        tensors: what is read, on the rank that has it.
        values: late values, each behind those of this microbatch that it is computed of.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[LateValue] = []
        self._arrived: Sequence[Tensor] | None = None

    def arrive(self, tensors: Sequence[Tensor]) -> None:
        """Takes the tensors that were read, which all ranks have now."""
        self._arrived = tensors

    def tensor(self, place: int) -> Tensor:
        """One of them.

        Raises:
            DeferredReadError: the step is not over.
        """
        if self._arrived is None:
            _refuse()
        return self._arrived[place]


def _refuse() -> NoReturn:
    raise DeferredReadError(
        f"{user_line()}: its value is asked for inside the step function, of something that was read of a "
        "tensor which only one rank has. It is known when the step has returned: return it, and decide by it "
        "there. (What was read while the step was traced, or in one that failed, is never known.)"
    )


# Greenlets have contexts of their own, so that microbatches do not see each other's.
_in_step_code: ContextVar[bool] = ContextVar("_in_step_code", default=False)
_reads: ContextVar[Reads | None] = ContextVar("_reads", default=None)


@contextmanager
def reading() -> Iterator[Reads]:
    """Inside, code of the step function runs."""
    reads = Reads()
    tokens = _in_step_code.set(True), _reads.set(reads)
    try:
        yield reads
    finally:
        _in_step_code.reset(tokens[0])
        _reads.reset(tokens[1])


@contextmanager
def in_code_of_model() -> Iterator[None]:
    """Inside, code of the model runs, whose reads are no late ones."""
    token = _in_step_code.set(False)
    try:
        yield
    finally:
        _in_step_code.reset(token)


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
    return LateValue(lambda: reader(reads.tensor(place)))
