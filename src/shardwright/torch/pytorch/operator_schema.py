"""Reads the schema of a PyTorch operator, and the tensors of a call."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = [
    "is_written",
    "map_arguments",
    "one_by_one",
    "takes_several",
    "tensors_in",
    "written_arguments",
    "written_tensors",
]


def is_written(argument: Any) -> bool:
    """Whether an operator changes an argument, or a result, in place."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call changes in place."""
    return [
        args[place] if place < len(args) else kwargs.get(name) for place, name in _written_parameters(func)
    ]


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call changes in place."""
    return tensors_in(written_arguments(func, args, kwargs))


@functools.cache
def _written_parameters(func: Any) -> tuple[tuple[int, str], ...]:
    parameters = enumerate(func._schema.arguments)
    return tuple((place, parameter.name) for place, parameter in parameters if is_written(parameter))


def tensors_in(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments of an operator, which are in lists at most."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += tensors_in(argument)
    return found


def map_arguments(
    function: Callable[[Tensor], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an operator with something else in the place of each tensor."""
    mapped = {name: _mapped(function, value) for name, value in kwargs.items()}
    return tuple(_mapped(function, value) for value in args), mapped


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, each) for each in value)
    return value


@functools.cache
def takes_several(func: Any) -> bool:
    """Whether an operator does the same with each tensor of lists, and `one_by_one` may run it."""
    return str(func._schema.name).startswith("aten::_foreach_")


def one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Runs an operator of lists on one tensor of each after the other: they are of several kinds."""
    results: list[Any] = []
    for index in range(len(args[0])):
        own = [item[index : index + 1] if isinstance(item, list | tuple) else item for item in args]
        results += func(*own, **kwargs) or ()
    return results or None
