"""Lines that a terminal of 80 columns would break."""

from shardwright.text import folded

__all__ = ["too_wide"]

_COLUMNS = 80
_WORD = 60
"""Letters; a line with a longer word (a path) stays as it is, however wide."""


def too_wide(text: str, *, folds: bool = False) -> list[str]:
    """The lines of a text that are wider than 80 columns, though their words are not."""
    lines = (folded(text, _COLUMNS) if folds else text).splitlines()
    return [line for line in lines if len(line) > _COLUMNS and max(map(len, line.split())) < _WORD]
