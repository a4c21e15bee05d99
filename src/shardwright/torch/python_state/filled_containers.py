"""Containers that a unit was given, and has changed: a dictionary of statistics, a list of losses.

In a trace a unit gets copies of the containers among its arguments, with fake tensors in them. What it does
to the copies is done to the step function's own, so that code which reads there finds what only the unit's
rank will have, and is refused. What units have appended to a list is no argument of later ones: their ranks
need not have it. Units that look at it (`container_states`) are on the rank that does.
"""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shardwright.torch.pytorch.tree import Structure, flatten, leaves

__all__ = ["FilledLists", "append_again", "give_back_changes", "given_the_same", "without_appended"]


def give_back_changes(own: Any, given: Any, known: Mapping[int, Any]) -> None:
    """Does to the containers of a step function what a call has done to those that it was given.

    Args:
        own: a tree as the step function has it.
        given: the tree that was made of it for the call, as the call has left it.
        known: id of a leaf that was put in -> the leaf that it stands for.

    >>> own = {"losses": [1.0], "n": 2}
    >>> give_back_changes(own, {"losses": [1.0, 0.5], "n": 3}, {})
    >>> own
    {'losses': [1.0, 0.5], 'n': 3}
    """
    if isinstance(own, dict | UserDict):
        for key in [key for key in own if key not in given]:
            del own[key]
        for key, value in given.items():
            if key not in own or not _same(own[key], value, known):
                own[key] = known.get(id(value), value)
    elif isinstance(own, list):
        common = min(len(own), len(given))
        for place in range(common):
            if not _same(own[place], given[place], known):
                own[place] = known.get(id(given[place]), given[place])
        own[common:] = [known.get(id(value), value) for value in given[common:]]
    elif isinstance(own, tuple):
        for mine, theirs in zip(own, given, strict=False):
            give_back_changes(mine, theirs, known)
    elif dataclasses.is_dataclass(own) and not isinstance(own, type):
        for field in dataclasses.fields(own):
            if hasattr(own, field.name) and hasattr(given, field.name):
                value = getattr(given, field.name)
                if not _same(getattr(own, field.name), value, known):
                    object.__setattr__(own, field.name, known.get(id(value), value))


def _same(own: Any, given: Any, known: Mapping[int, Any]) -> bool:
    """Whether an entry is the one that was put in; what is inside of it is given back at once."""
    if given is own or known.get(id(given), given) is own:
        return True
    is_container = isinstance(own, dict | UserDict | list | tuple) or dataclasses.is_dataclass(own)
    if is_container and type(own) is type(given):
        if isinstance(own, tuple) and len(own) != len(given):
            return False
        give_back_changes(own, given, known)
        return True
    return isinstance(own, set | frozenset) and type(own) is type(given)


def without_appended(tree: Any, is_made: Callable[[Any], bool]) -> Any:
    """A tree whose lists do not have what units have appended to them; itself where there is none.

    Args:
        tree: arguments of a call.
        is_made: tells whether a leaf was made inside a unit.
    """
    if type(tree) is list:
        kept = [without_appended(item, is_made) for item in tree if not is_made(item)]
        return tree if len(kept) == len(tree) and all(map(_is, kept, tree)) else kept
    if type(tree) is tuple:
        items = tuple(without_appended(item, is_made) for item in tree)
        return tree if all(map(_is, items, tree)) else items
    if type(tree) is dict:
        values = {key: without_appended(value, is_made) for key, value in tree.items()}
        return tree if all(map(_is, values.values(), tree.values())) else values
    return tree


def append_again(own: Any, given: Any, is_made: Callable[[Any], bool]) -> None:
    """Puts into the lists of a tree what `without_appended` has left out of it.

    Args:
        own: the tree with everything.
        given: the tree without, perhaps with other leaves.
        is_made: tells whether a leaf was made inside a unit.
    """
    if type(own) is list:
        rest = iter(list(given))
        given[:] = [item if is_made(item) else next(rest) for item in own]
    if type(own) in (list, tuple):
        for mine, theirs in zip(own, given, strict=True):
            append_again(mine, theirs, is_made)
    elif type(own) is dict:
        for key, value in own.items():
            append_again(value, given[key], is_made)


def given_the_same(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that, made again, finds in containers what they held the first time."""
    first: list[tuple[list[Any], Structure]] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if first:
            items, structure = first[0]
            args, kwargs = structure.rebuild(items)
        else:
            first.append(flatten((args, kwargs)))
        return call(*args, **kwargs)

    return called


class FilledLists:
    """The lists to which units of this rank have appended tensors, in one microbatch."""

    def __init__(self) -> None:
        self._appended: dict[int, Any] = {}

    @property
    def are_filled(self) -> bool:
        """Whether there are any."""
        return bool(self._appended)

    def without_appended(self, own: Any) -> Any:
        """A tree as units on other ranks find it; itself where nothing was appended."""
        return without_appended(own, self._is_appended) if self._appended else own

    def called(self, call: Callable[..., Any], own: Any, given: Any) -> Any:
        """Calls a unit that may change containers, or find what others have put there.

        Args:
            call: the unit.
            own: (args, kwargs) of the step function.
            given: of the unit: the same without what was appended, some leaves replaced.
        """
        items, structure = flatten(given)
        pairs = zip(leaves(self.without_appended(own)), items, strict=True)
        known = {id(theirs): mine for mine, theirs in pairs if mine is not theirs}
        before = {id(item) for item in leaves(own)}
        args, kwargs = structure.rebuild(items)
        append_again(own, (args, kwargs), self._is_appended)
        result = call(*args, **kwargs)
        give_back_changes(own, (args, kwargs), known)
        for item in leaves(own):
            if isinstance(item, Tensor) and id(item) not in before:
                self._appended[id(item)] = item
        return result

    def clear(self) -> None:
        """Lets go of everything."""
        self._appended.clear()

    def _is_appended(self, item: Any) -> bool:
        return id(item) in self._appended


def _is(one: Any, other: Any) -> bool:
    return one is other
