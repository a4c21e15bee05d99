"""Containers that a unit was given, and has changed: a dictionary of statistics, a list of losses.

In a trace a unit gets copies of the containers among its arguments, with fake tensors in them. What it does
to the copies is done to the step function's own, so that code which reads there finds what only the unit's
rank will have, and is refused. Units that append to one list each get it as it was before the first.
"""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["give_back_changes", "without_appended"]


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
    if known.get(id(given), given) is own:
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


def _is(one: Any, other: Any) -> bool:
    return one is other
