"""What is in a list, dictionary or set at one moment, to be compared with later and put back."""

from typing import Any

from torch import Tensor

__all__ = ["content_of", "has_content", "put_content", "versions_of"]

_KINDS = (dict, list, set)


def content_of(value: Any) -> Any:
    """A copy of one level; None for anything else than a container."""
    return next((kind(value) for kind in _KINDS if isinstance(value, kind)), None)


def has_content(value: Any, content: Any) -> bool:
    """Whether exactly these objects are in a container, dictionaries in the same order: hooks run in theirs.

    Args:
        value: the container, or what it holds now.
        content: from `content_of`; None, for what is no container, is equal to None.
    """
    if content is None or value is None:
        return content is None
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        return list(value) == list(content) and all(value[key] is item for key, item in content.items())
    if isinstance(value, list):
        return all(a is b for a, b in zip(value, content, strict=True))
    return bool(value == content)


def versions_of(value: Any) -> tuple[int, ...]:
    """How often tensors have been changed in place: a tensor, or those in a container."""
    content = value.values() if isinstance(value, dict) else value
    items = content if isinstance(value, _KINDS) else (value,)
    return tuple(item._version for item in items if type(item) is Tensor and not item.is_inference())


def put_content(container: Any, content: Any) -> None:
    """Makes it what is in a container; one that has it is left alone: it may refuse to be written to."""
    if has_content(container, content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
