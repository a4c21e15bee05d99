"""Reads JSON from an untrusted file: limits on size and depth, no name twice."""

import json
from typing import Any

from shardwright.errors import CorruptCheckpointError
from shardwright.files import no_name_twice

__all__ = ["parse"]

_DEEPEST = 64


def parse(content: bytes, *, name: str) -> Any:
    """Reads a document.

    >>> parse(b'{"step": 3}', name="state.json")
    {'step': 3}
    """
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=no_name_twice)
    except RecursionError as error:
        raise _too_deep(name) from error
    except (UnicodeDecodeError, ValueError) as error:
        raise CorruptCheckpointError(f"{name} is no JSON: {error}. Nothing was loaded.") from error
    _refuse_deep(found, name)
    return found


def _refuse_deep(document: Any, name: str) -> None:
    """Goes through it level by level: whoever uses it may recurse, and here nothing does."""
    level = [document]
    for _ in range(_DEEPEST + 1):
        inside = [each.values() if isinstance(each, dict) else each for each in level if _contains(each)]
        if not inside:
            return
        level = [each for values in inside for each in values]
    raise _too_deep(name)


def _contains(found: Any) -> bool:
    return isinstance(found, dict | list)


def _too_deep(name: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{name} is nested more than {_DEEPEST} deep. Nothing was loaded.")
