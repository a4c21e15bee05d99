"""The last output of a dying process."""

import re

from shardwright.launch.processes.folding import CHAIN, fold

__all__ = ["begins_last_words", "is_uncaught", "last_words"]

_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"
# torch.distributed puts the rank before each line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?", re.MULTILINE)
_CHAIN = re.compile(rf"{CHAIN}\s*$")
# A run that ends on an error still says how far it has come, and what it came to, below the traceback.
_PROGRESS = re.compile(
    r"(?:\n+(?:step \d+ \| |(?:done|stopped|failed): \d+ steps?\b|  (?:the step took|report|saved) |saved )"
    r"[^\n]*)+\s*\Z"
)
_MAX_LINES = 80
_NUM_LINES_WITHOUT_TRACEBACK = 5


def begins_last_words(line: str) -> bool:
    """Says whether a line of stderr begins a traceback or a report of Python's fault handler."""
    return _RANK_PREFIX.sub("", line).startswith((_TRACEBACK, _FATAL))


def is_uncaught(line: str) -> bool:
    """Says whether torch.distributed has put the rank before a line: it does so for errors nobody caught."""
    return _RANK_PREFIX.match(line) is not None


def last_words(stderr: str) -> str:
    """Finds the cause of a process's end in its stderr.

    >>> print(last_words("working\\nTraceback (most recent call last):\\n  File 'a'\\nValueError: boom\\n"))
    Traceback (most recent call last):
      File 'a'
    ValueError: boom
    """
    text = _RANK_PREFIX.sub("", stderr)
    start = text.rfind(_FATAL)
    if start < 0:
        start = _start_of_chain(text)
    if start < 0:
        return "\n".join(text.rstrip().splitlines()[-_NUM_LINES_WITHOUT_TRACEBACK:])
    traceback = _PROGRESS.sub("", text[start:]).rstrip()
    lines = fold(traceback, to_the_end=False).splitlines()
    if len(lines) > _MAX_LINES:
        kept = _MAX_LINES // 2
        lines = [*lines[:kept], f"  [{len(lines) - 2 * kept} lines left out]", *lines[-kept:]]
    return "\n".join(lines)


def _start_of_chain(text: str) -> int:
    start = text.rfind(_TRACEBACK)
    while start > 0 and _CHAIN.search(text[:start]):
        start = text.rfind(_TRACEBACK, 0, start)
    return start
