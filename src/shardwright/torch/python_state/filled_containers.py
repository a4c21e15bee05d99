"""Containers among the arguments of a unit that the unit changes are a part of its result.

::

    feats.append(y)             in a unit that is given `feats`
    info["depth"] += 1

Every rank runs the step function with containers of its own, and only the rank of a unit runs the unit. So a
call that changes containers returns `Filled`: what the unit returned, and what is in the containers now. Its
tensors are values of the graph like any other result, its numbers are those of the trace, and every rank puts
both into its own containers.
"""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from shardwright.torch.interception.unit_attributes import call_copy
from shardwright.torch.pytorch.tree import entries_of, flatten, put_entries, same_entries


class Filled(NamedTuple):
    """The result of a call that changes containers among its arguments.

    Attributes:
        result: what the unit returned.
        contents: number of a container (see `Containers`) -> its entries.
    """

    result: Any
    contents: dict[int, dict[Any, Any]]


class _Contained(NamedTuple):
    """In place of an entry that is itself a container among the arguments."""

    number: int


class Containers:
    """The lists, dictionaries and dataclasses among the arguments of a call, numbered from the outermost."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]):
        self._items = [item for given in (*args, *kwargs.values()) for item in _containers_in(given)]
        self._before = [entries_of(item) for item in self._items]

    @property
    def changed(self) -> tuple[int, ...]:
        """Numbers of those that hold something else than at first."""
        return tuple(
            number
            for number, (item, before) in enumerate(zip(self._items, self._before, strict=True))
            if not same_entries(entries_of(item), before)
        )

    def filled(self, result: Any, numbers: Sequence[int]) -> Any:
        """The result of a call, with the contents of these containers; the result alone for none."""
        if not numbers:
            return result
        known = {id(item): _Contained(number) for number, item in enumerate(self._items)}
        entries = {number: entries_of(self._items[number]) for number in numbers}
        return Filled(
            result,
            {
                number: {key: known.get(id(value), value) for key, value in held.items()}
                for number, held in entries.items()
            },
        )

    def put(self, contents: dict[int, dict[Any, Any]]) -> None:
        """Has these containers hold what `filled` found in others at the same places."""
        for number, entries in contents.items():
            own = {
                key: self._items[value.number] if type(value) is _Contained else value
                for key, value in entries.items()
            }
            put_entries(self._items[number], own)


def fill(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Puts what a call has filled into the step function's own containers.

    >>> losses = [1.0]
    >>> fill(Filled("y", {0: {0: 1.0, 1: 0.5}}), (losses,), {})
    'y'
    >>> losses
    [1.0, 0.5]
    """
    if type(result) is not Filled:
        return result
    Containers(args, kwargs).put(result.contents)
    return result.result


def filled_copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function or a copy of a unit (see `call_copy`); gives what leaves it, containers included.

    >>> filled_copy(lambda losses: losses.append(0.5), ([1.0],), {})
    Filled(result=None, contents={0: {0: 1.0, 1: 0.5}})
    """
    containers = Containers(args, kwargs)
    result = call_copy(func, args, kwargs)
    return containers.filled(result, containers.changed)


def returning_contents(
    call: Callable[..., Any], numbers: Sequence[int], refuse: Callable[[], NoReturn]
) -> Callable[..., Any]:
    """A call that fills copies of containers and returns their contents; so it can be made again."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if numbers:
            items, structure = flatten((args, kwargs))
            args, kwargs = structure.rebuild(items)
        containers = Containers(args, kwargs)
        result = call(*args, **kwargs)
        if not set(containers.changed).issubset(numbers):
            refuse()
        return containers.filled(result, numbers)

    return called


def _containers_in(tree: Any, around: frozenset[int] = frozenset()) -> Iterator[Any]:
    """The containers in a tree; `around` are those that the tree is in, to which it may refer back."""
    if id(tree) in around:
        return
    is_dataclass = dataclasses.is_dataclass(tree) and not isinstance(tree, type)
    if isinstance(tree, UserDict):
        yield from _containers_in(tree.data, around)
    elif isinstance(tree, list | dict) or is_dataclass:
        yield tree
    if isinstance(tree, dict):
        inner = list(tree.values())
    elif isinstance(tree, list | tuple):
        inner = list(tree)
    else:
        inner = list(entries_of(tree).values()) if is_dataclass else []
    around = around | {id(tree)} if inner else around
    for item in inner:
        yield from _containers_in(item, around)
