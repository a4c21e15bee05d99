"""Snapshots the content of a list, dictionary or set, to compare and restore.

Reading a subclass may run code (a mapping that imports what it names), so it is read as its built-in base
class.
"""

from typing import Any

from torch import Tensor

__all__ = ["ABSENT", "PLAIN", "content_of", "has_content", "is_same", "put_content", "versions_of"]

ABSENT: Any = object()  # in place of an entry or attribute that is not there
PLAIN = frozenset({type(None), bool, int, float, str})  # what nothing can change


def is_same(one: Any, other: Any) -> bool:
    """Whether it is the same object, or the same number or text."""
    return one is other or (type(one) is type(other) and type(one) in PLAIN and bool(one == other))


def content_of(value: Any) -> Any:
    """A copy of one level; None for anything else than a container."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return list.copy(value)
    return set.copy(value) if isinstance(value, set) else None


def has_content(value: Any, content: Any) -> bool:
    """Whether exactly these objects are in a container, dictionaries in the same order: hooks run in theirs.

    Args:
        value: the container, or what it holds now.
        content: from `content_of`; None, for what is no container, is equal to None.
    """
    if content is None or value is None:
        return content is None
    now = content_of(value)
    if len(now) != len(content):
        return False
    if isinstance(now, dict):
        return list(now) == list(content) and all(now[key] is item for key, item in content.items())
    if isinstance(now, list):
        return all(a is b for a, b in zip(now, content, strict=True))
    return bool(now == content)


def versions_of(value: Any) -> tuple[int, ...]:
    """How often tensors have been changed in place: a tensor, or those in a container."""
    content = content_of(value)
    items = (value,) if content is None else content.values() if isinstance(content, dict) else content
    return tuple(item._version for item in items if type(item) is Tensor and not item.is_inference())


def put_content(container: Any, content: Any) -> None:
    """Restores a container's content; skips an unchanged one, which may refuse writes."""
    if has_content(container, content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
