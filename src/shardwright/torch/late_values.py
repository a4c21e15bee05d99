"""Numbers that a step function reads of tensors that only one rank has: known when the step is over.

Scripts of other libraries read the loss in the step function itself, where every rank has it::

    loss = model(x, y)             on one rank
    model.backward(loss)
    return loss.item()             a number that is not known yet; a list of numbers, when the step returns

What is read is computed with, and returned, but nothing can be decided by it. Code of the model is not meant:
a module that looks at values is placed whole instead.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.errors import DeferredReadError
from shardwright.torch.source_line import user_line
from shardwright.torch.step_output import StepOutput
from shardwright.torch.tree import flatten

__all__ = ["LateValue", "WithLateValues", "in_code_of_model", "reads_late"]

# Greenlets have contexts of their own, so that microbatches do not see each other's.
_in_step_code: ContextVar[bool] = ContextVar("_in_step_code", default=False)

_READERS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
    Tensor.numpy: lambda tensor: tensor.cpu().numpy(),
}


class LateValue:
    """What Python code reads of a tensor that may be on another rank.

    Sums, differences, products and quotients of it are late values, too.

    Args:
        tensor: whose value it is.
        reader: makes of it what the code asked for.
    """

    __slots__ = ("reader", "tensor")

    def __init__(self, tensor: Tensor, reader: Callable[[Tensor], Any]):
        self.tensor = tensor
        self.reader = reader

    def _computed(self, compute: Callable[[Tensor, Any], Tensor], other: Any) -> "LateValue":
        if self.reader is not Tensor.item:
            self._refuse("a sum or product of it")
        return LateValue(compute(_number(self.tensor), _operand(other)), Tensor.item)

    def __add__(self, other: Any) -> "LateValue":
        return self._computed(lambda a, b: a + b, other)

    def __sub__(self, other: Any) -> "LateValue":
        return self._computed(lambda a, b: a - b, other)

    def __rsub__(self, other: Any) -> "LateValue":
        return self._computed(lambda a, b: b - a, other)

    def __mul__(self, other: Any) -> "LateValue":
        return self._computed(lambda a, b: a * b, other)

    def __truediv__(self, other: Any) -> "LateValue":
        return self._computed(lambda a, b: a.to(torch.float64) / b, other)

    def __rtruediv__(self, other: Any) -> "LateValue":
        return self._computed(lambda a, b: b / a.to(torch.float64), other)

    def __neg__(self) -> "LateValue":
        return self._computed(lambda a, b: -a, 0)

    __radd__ = __add__
    __rmul__ = __mul__

    def _refuse(self, what: str = "its value") -> NoReturn:
        raise DeferredReadError(
            f"{user_line()}: {what} is asked for inside the step function, of something that was read of a "
            "tensor which only one rank has. It is known when the step has returned: return it."
        )

    def __bool__(self) -> bool:
        self._refuse()

    def __float__(self) -> float:
        self._refuse()

    def __int__(self) -> int:
        self._refuse()

    __index__ = __int__
    __hash__ = object.__hash__

    def _refused(self, *_: Any) -> NoReturn:
        self._refuse()

    __lt__ = __le__ = __gt__ = __ge__ = _refused
    __eq__ = __ne__ = _refused
    __getitem__ = __len__ = __iter__ = _refused

    def __repr__(self) -> str:
        return "LateValue(known when the step has returned)"

    def __format__(self, format_spec: str) -> str:
        return repr(self)


def reads_late(func: Any) -> Callable[[Tensor], Any] | None:
    """What makes a value of a tensor later, where the step function's own code reads it now; else None.

    Args:
        func: the torch function that is called.
    """
    return _READERS.get(func) if _in_step_code.get() else None


@contextmanager
def in_code_of_model() -> Iterator[None]:
    """Inside, code of the model runs, whose reads are no late ones."""
    token = _in_step_code.set(False)
    try:
        yield
    finally:
        _in_step_code.reset(token)


class WithLateValues:
    """A step function whose own code may read tensors that are on another rank.

    Args:
        function: the step function.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._function = function
        self._late: dict[tuple[Any, ...], Callable[[Tensor], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _in_step_code.set(True)
        try:
            result = self._function(*args, **kwargs)
        finally:
            _in_step_code.reset(token)
        items, structure = flatten(result)
        late = {
            path: item.reader
            for path, item in zip(structure.paths(), items, strict=True)
            if isinstance(item, LateValue)
        }
        self._late = late
        if not late:
            return result
        return structure.rebuild([item.tensor if isinstance(item, LateValue) else item for item in items])

    def read(self, result: Any) -> Any:
        """Puts lists of what was read in the places of the tensors that a step gives back for it."""
        if not self._late:
            return result
        items, structure = flatten(result)
        return structure.rebuild(
            [
                [self._late[path](tensor) for tensor in item.outputs]
                if path in self._late and isinstance(item, StepOutput)
                else item
                for path, item in zip(structure.paths(), items, strict=True)
            ]
        )


def _number(tensor: Tensor) -> Tensor:
    """As Python's numbers are: in 64 bits."""
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor.to(torch.int64)


def _operand(other: Any) -> Any:
    return _number(other.tensor) if isinstance(other, LateValue) else other
