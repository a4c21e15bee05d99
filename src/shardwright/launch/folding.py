"""Tracebacks without what happens inside Shardwright: a user's own lines are then not to be searched for."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import shardwright

__all__ = ["fold"]

_FRAME = '  File "'
_OURS = f"{_FRAME}{Path(shardwright.__file__).parent}/"
_FEW = 2
"""So many frames are shown: a line in their place would hardly be shorter."""


def fold(traceback: str, *, to_the_end: bool) -> str:
    """Puts one line in place of each row of frames that are inside Shardwright.

    Args:
        traceback: as Python prints it, with those that it is chained to.
        to_the_end: also the last frames, which tell where the error was raised: not needed where it is an
            error that is meant for users.

    >>> print(fold('Traceback (most recent call last):\\n  File "a.py", line 3\\nValueError: boom',
    ...            to_the_end=True))
    Traceback (most recent call last):
      File "a.py", line 3
    ValueError: boom
    """
    parts = [(kind, list(part)) for kind, part in groupby(_frames(traceback), key=lambda frame: frame[0])]
    lines: list[str] = []
    for position, (kind, frames) in enumerate(parts):
        goes_on = position + 1 < len(parts) and parts[position + 1][0] == "frame"
        if kind == "ours" and len(frames) > _FEW and (goes_on or to_the_end):
            lines.append(f"  [{len(frames)} calls inside shardwright]")
        else:
            lines += [line for _, frame in frames for line in frame]
    return "\n".join(lines)


def _frames(traceback: str) -> Iterator[tuple[str, list[str]]]:
    """The frames, and what stands between them, each with its lines: ours, "frame" or "text"."""
    kind, lines = "text", list[str]()
    for line in traceback.splitlines():
        begins = line.startswith(_FRAME)
        if begins or (kind != "text" and not line.startswith("    ")):
            if lines:
                yield kind, lines
            kind = ("ours" if line.startswith(_OURS) else "frame") if begins else "text"
            lines = []
        lines.append(line)
    if lines:
        yield kind, lines
