"""What is in containers and objects that variables of a script hold, and how it is put back after a trace.

Numbers, texts, and containers of such alone are put back, as is what was taken out. Other objects that were
put in stay, for who knows what they are for: a table that is made once, a file that was opened. An empty
container is one of such alone: a new one is taken out, and made again when the step runs.
"""

import numbers
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch

from shardwright.torch.pytorch.container_content import content_of, put_content

__all__ = [
    "CONTAINERS",
    "PLAIN",
    "content_of_variable",
    "is_plain",
    "items_of",
    "put_all_back",
    "put_plain_back",
    "put_slots_back",
    "slots_of",
]

# Others may do things when they are read.
CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set})
PLAIN = frozenset({type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size})
_DEPTH = 3
_LONGEST = 10_000  # what is beyond is data


def items_of(container: Any) -> list[Any]:
    """What is in a container, without keys."""
    return list(container.values() if isinstance(container, dict) else container)


def content_of_variable(container: Any) -> Any:
    """A copy of one level; a list for a deque."""
    return list(container) if type(container) is deque else content_of(container)


def is_plain(item: Any, depth: int = _DEPTH) -> bool:
    """Whether it is a number, a text or the like, or a container of such alone."""
    kind = type(item)
    if kind in PLAIN:
        return True
    if kind in CONTAINERS or kind is tuple:
        if depth == 0 or len(item) > _LONGEST:
            return False
        return all(is_plain(inner, depth - 1) for inner in items_of(item))
    return issubclass(kind, numbers.Number | np.generic)


def put_all_back(container: Any, content: Any) -> None:
    """Makes it what is in a container."""
    if type(container) is not deque:
        put_content(container, content)
    elif not _are_same(list(container), content):
        container.clear()
        container.extend(content)


def put_plain_back(
    container: Any, content: Any, is_fake: Callable[[Any], bool], *, but: Collection[Any] = ()
) -> None:
    """Puts back what was plain and was changed or taken out, and takes out what is plain or fake and new.

    Args:
        container: of `CONTAINERS`.
        content: what was in it, from `content_of_variable`.
        is_fake: tells of what comes from a trace.
        but: keys that others write to; only what is fake is taken out there.
    """
    if isinstance(container, dict):
        _put_back_in_dict(container, content, is_fake, but)
    elif isinstance(container, set):
        container.difference_update([i for i in container - content if is_fake(i) or is_plain(i)])
        container.update(content)
    else:
        _put_back_in_list(container, content, is_fake)


def _put_back_in_dict(
    container: dict[Any, Any],
    content: dict[Any, Any],
    is_fake: Callable[[Any], bool],
    but: Collection[Any],
) -> None:
    for key, item in list(container.items()):
        is_ours = key not in but
        if key not in content:
            if is_fake(item) or (is_ours and is_plain(item)):
                del container[key]
        elif item is not content[key] and (
            is_fake(item) or (is_ours and is_plain(item) and is_plain(content[key]))
        ):
            container[key] = content[key]
    missing = [key for key in content if key not in container and key not in but]
    for key in missing:
        container[key] = content[key]
    if missing and "__builtins__" not in container:  # a script may ask which one is the first
        for key in [*content, *(key for key in list(container) if key not in content)]:
            if key in container:
                container[key] = container.pop(key)


def _put_back_in_list(container: Any, content: list[Any], is_fake: Callable[[Any], bool]) -> None:
    now = list(container)
    if _are_same(now, content):
        return
    before = set(map(id, content))
    others = [item for item in now if id(item) not in before and not is_plain(item)]
    if not others or any(map(is_fake, others)):
        container.clear()
        container.extend(content)
        return
    if all(map(is_plain, now[len(content) :])):
        for _ in now[len(content) :]:
            container.pop()
    for place, item in enumerate(content[: len(container)]):
        if container[place] is not item and is_plain(container[place]) and is_plain(item):
            container[place] = item


def _are_same(now: list[Any], content: list[Any]) -> bool:
    return len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True))


def slots_of(item: Any) -> dict[Any, Any]:
    """What is in the slots of an object of a Python class: descriptor -> content."""
    found = {}
    for kind in type(item).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if type(slot) is MemberDescriptorType:
                try:
                    found[slot] = slot.__get__(item)
                except AttributeError:
                    continue  # nothing is in it
    return found


def put_slots_back(
    item: Any, content: dict[Any, Any], is_fake: Callable[[Any], bool], *, but: Collection[str] = ()
) -> None:
    """Does for slots what `put_plain_back` does for a dictionary."""
    now = slots_of(item)
    wanted = dict(now)
    put_plain_back(wanted, content, is_fake, but={slot for slot in (*now, *content) if slot.__name__ in but})
    for slot in now.keys() - wanted.keys():
        slot.__delete__(item)
    for slot, value in wanted.items():
        if slot not in now or now[slot] is not value:
            slot.__set__(item, value)
