"""Folds Shardwright's frames out of tracebacks, so that the user's own lines stand out."""

import re
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import shardwright

__all__ = ["CHAIN", "fold"]

CHAIN = (
    r"(?:During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:)"
)
"""The line between two tracebacks of a chain."""
_LINK = re.compile(rf"\n\n{CHAIN}\n\n")
_FRAME = '  File "'
_OURS = f"{_FRAME}{Path(shardwright.__file__).parent}/"
_TORCH_SPEC = find_spec("torch")
_TORCH = tuple(
    f"{_FRAME}{folder}/" for folder in (_TORCH_SPEC and _TORCH_SPEC.submodule_search_locations) or ()
)
_STDLIB = f"{_FRAME}{sysconfig.get_paths()['stdlib']}/"
_FEW = 2
"""So many frames are shown: a line in their place would hardly be shorter."""


def fold(traceback: str, *, to_the_end: bool) -> str:
    """Puts one line in place of each row of frames that are inside Shardwright.

    PyTorch's frames that call Shardwright, or that it calls, belong to the row: hooks of modules, what
    ``torch._dynamo`` puts around a function. So two lines of the user's have one line between them.

    >>> print(fold('Traceback (most recent call last):\\n  File "a.py", line 3\\nValueError: boom',
    ...            to_the_end=True))
    Traceback (most recent call last):
      File "a.py", line 3
    ValueError: boom
    """
    if to_the_end:
        traceback = _without_causes_inside(traceback)
    lines: list[str] = []
    rows = [(is_inside, list(row)) for is_inside, row in groupby(_frames(traceback), key=_is_inside)]
    for position, (is_inside, row) in enumerate(rows):
        goes_on = position + 1 < len(rows) and rows[position + 1][1][0][0] != "text"
        folded = _length_to_fold(row, goes_on=goes_on, to_the_end=to_the_end) if is_inside else 0
        if folded > _FEW:
            kinds = {kind for kind, _ in row[:folded]}
            lines.append(f"  [{folded} calls inside shardwright{' and torch' if 'torch' in kinds else ''}]")
            row = row[folded:]
        lines += [line for _, frame in row for line in frame]
    return "\n".join(lines)


def _without_causes_inside(traceback: str) -> str:
    """A chain from the first traceback on that has a line of the user's."""
    start = 0
    for link in _LINK.finditer(traceback):
        frames = [frame[0] for kind, frame in _frames(traceback[start : link.start()]) if kind == "frame"]
        if not all(line.startswith(_STDLIB) and "/site-packages/" not in line for line in frames):
            break
        start = link.end()
    return traceback[start:]


def _is_inside(frame: tuple[str, list[str]]) -> bool:
    return frame[0] in {"ours", "torch"}


def _length_to_fold(row: list[tuple[str, list[str]]], *, goes_on: bool, to_the_end: bool) -> int:
    """The number of a row's first frames that go into one line; PyTorch's alone are none of our business."""
    if all(kind == "torch" for kind, _ in row):
        return 0
    if goes_on or to_the_end:
        return len(row)
    # Below is the error: the frame that raised it is shown, and all where it may be a mistake of ours.
    return len(row) - 1 if row[-1][0] == "torch" else 0


def _frames(traceback: str) -> Iterator[tuple[str, list[str]]]:
    """The frames, and what stands between them, each with its lines: ours, "torch", "frame" or "text"."""
    kind, lines = "text", list[str]()
    for line in traceback.splitlines():
        begins = line.startswith(_FRAME)
        if begins or (kind != "text" and not line.startswith("    ")):
            if lines:
                yield kind, lines
            kind = _kind_of(line) if begins else "text"
            lines = []
        lines.append(line)
    if lines:
        yield kind, lines


def _kind_of(line: str) -> str:
    if line.startswith(_OURS):
        return "ours"
    return "torch" if line.startswith(_TORCH) else "frame"
