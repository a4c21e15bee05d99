"""JSON from a file that nobody vouches for: limits on its size and depth, no name twice."""

import json
import re
from typing import Any

from shardwright.errors import CorruptCheckpointError

__all__ = ["parse"]

_DEEPEST = 64
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_BRACKET = re.compile(rb"[^\[\]{}]+")


def parse(content: bytes, *, name: str) -> Any:
    """Reads a document.

    Args:
        content: of the file.
        name: of the file, for messages.

    Raises:
        CorruptCheckpointError: it is no JSON, nested too deep, or has a name twice.

    >>> parse(b'{"step": 3}', name="state.json")
    {'step': 3}
    """
    if _depth(content) > _DEEPEST:
        raise CorruptCheckpointError(f"{name} is nested more than {_DEEPEST} deep. Nothing was loaded.")
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_no_name_twice)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name} is no JSON: {error}. Nothing was loaded.") from error


def _depth(content: bytes) -> int:
    """How deep it is nested."""
    deepest = depth = 0
    for bracket in _NO_BRACKET.sub(b"", _TEXT.sub(b"", content)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found
