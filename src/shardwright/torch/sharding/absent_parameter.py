"""A sharded parameter inside a step, while its rows are not gathered.

Any computation with it first gathers its rows; the Python object then is an ordinary parameter. A query of
its shape or gradient gathers nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.torch._private import without_subclass_functions
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.pytorch.functions import OF_GRADIENT, is_metadata
from shardwright.torch.pytorch.tree import leaves, map_tree

__all__ = ["AbsentParameter", "Bring", "absent_arguments_brought", "becomes_absent", "becomes_present"]

Bring = Callable[[Sequence[Tensor]], None]
"""Has all rows of the parameters among some tensors at hand."""

_PLACE = "_shardwright_absent"


class Shown(Protocol):
    """The holder of a parameter's forms: see `ShardedParameter`."""

    @property
    def parameter(self) -> Tensor:
        """In its present form."""

    @property
    def holder(self) -> Tensor:
        """The tensor that has the gradient."""


def _accessors(*names: str) -> set[Any]:
    found = (getattr(Tensor, name, None) for name in names)
    return {
        accessor
        for each in found
        for kind in ("__get__", "__set__")
        if (accessor := getattr(each, kind, None))
    }


_OF_HOOKS = frozenset(_accessors("_backward_hooks", "_post_accumulate_grad_hooks"))


class AbsentParameter(ShardedTensor):
    """A parameter whose rows are gathered when they are needed.

    `becomes_absent` makes a parameter that is a `ShardedTensor` one of these.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_GRADIENT:  # it belongs to the form of the parameter that computes
            sharded, _ = vars(args[0])[_PLACE]
            return func(sharded.holder, *args[1:])
        if is_metadata(func) or func in _OF_HOOKS:
            with without_subclass_functions():
                return func(*args, **kwargs)
        args, kwargs = _brought((args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def absent_arguments_brought() -> Iterator[None]:
    """Has custom functions (`torch.autograd.Function`) find their arguments at hand.

    Their `apply` takes tensors past `__torch_function__`, as do the functions of reentrant checkpoints.
    """
    kind: Any = torch.autograd.Function
    original = kind.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(item, AbsentParameter) for item in args):
            args = _brought(args)
        return MethodType(original.__func__, cls)(*args, **kwargs)

    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        kind.apply = original


def _brought(given: Any) -> Any:
    """Arguments with all rows at hand of the parameters among them.

    What a checkpoint has saved while rows were absent is another Python object than the parameter.
    """
    absent = next(item for item in leaves(given) if isinstance(item, AbsentParameter))
    _, bring = vars(absent)[_PLACE]
    given = map_tree(_parameter_of, given)
    bring([item for item in leaves(given) if isinstance(item, Tensor)])
    return given


def _parameter_of(item: Any) -> Any:
    return vars(item)[_PLACE][0].parameter if isinstance(item, AbsentParameter) else item


def becomes_absent(parameter: Tensor, sharded: Shown, bring: Bring) -> None:
    """Has a parameter bring its rows when they are needed."""
    vars(parameter)[_PLACE] = sharded, bring
    parameter.__class__ = AbsentParameter


def becomes_present(parameter: Tensor) -> None:
    """Takes back `becomes_absent`; nothing happens where that was not called."""
    if type(parameter) is AbsentParameter:
        parameter.__class__ = ShardedTensor  # type: ignore[assignment]
        del vars(parameter)[_PLACE]
