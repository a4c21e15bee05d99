"""The console of a run: progress lines on stderr, from one rank.

Results go to stdout, progress to stderr. ``-q`` (``SHARDWRIGHT_QUIET=1``) silences progress. Only a terminal
gets colour and lines rewritten in place; ``NO_COLOR`` turns off the first, ``CI`` the second. A launcher
that passes the output of ranks on to a terminal says so (``SHARDWRIGHT_TERMINAL=1``).
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from shardwright.printable import printable
from shardwright.quantities import format_seconds
from shardwright.text_folding import cut, folded

__all__ = ["Console", "Phase"]

_PATIENCE_S = 2.0
_BETWEEN_PARTS_S = 10.0
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_CLEAR_LINE = "\x1b[K"


class Console:
    """Writes progress.

    Attributes:
        rewrites: whether lines can be rewritten in place.

    >>> console = Console(stream=sys.stdout, environ={})
    >>> console.status("joining 2 ranks")
    joining 2 ranks
    """

    def __init__(
        self,
        *,
        prints: bool = True,
        stream: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._live_line = False
        self.prints = prints and not _is_set(environ, "SHARDWRIGHT_QUIET")
        self._is_terminal = self._target.isatty()
        terminal = self._is_terminal or _is_set(environ, "SHARDWRIGHT_TERMINAL")
        terminal = terminal and environ.get("TERM") != "dumb"
        # NO_COLOR counts with any value but the empty one (no-color.org).
        self._color = terminal and not environ.get("NO_COLOR")
        self.rewrites = terminal and not _is_set(environ, "CI")

    def line(self, text: str) -> None:
        """Prints text, of one line or several; folded to the width of a terminal that gets it directly."""
        if self.prints:
            self._write(f"{self._fold(printable(text, lines=True))}\n")

    def status(self, text: str) -> None:
        """Prints the current activity."""
        if self.prints:
            self._write(f"{self._dim(self._fold(text))}\n")

    @contextmanager
    def phase(self, text: str) -> Iterator["Phase"]:
        """Says at once what begins, and at the end how long it took if it took longer than 2 s.

        >>> console = Console(stream=sys.stdout, environ={})
        >>> with console.phase("tracing the model"):
        ...     pass
        tracing the model ...
        """
        start = self._clock()
        self.status(f"{text} ...")
        phase = Phase(self, text, self._clock)
        done = False
        try:
            yield phase
            done = True
        finally:
            self._end_live_line()
            elapsed_s = self._clock() - start
            if elapsed_s > _PATIENCE_S:
                verb = "" if done else "stopped after "
                self.status(f"{text}: {verb}{format_seconds(elapsed_s)}")

    def rewrite(self, text: str) -> bool:
        """Replaces the last rewritten line; returns False where lines cannot be rewritten."""
        if self.prints and self.rewrites:
            if self._is_terminal:  # what a terminal continues in the next line stays there
                text = cut(text, shutil.get_terminal_size().columns - 1)
            self._write(f"{self._dim(text)}\r")  # whatever is written next replaces it
            self._live_line = True
        return self.rewrites

    @property
    def _target(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr

    def _fold(self, text: str) -> str:
        return folded(text, shutil.get_terminal_size().columns) if self._is_terminal else text

    def _dim(self, text: str) -> str:
        text = printable(text, lines=True)
        return f"{_DIM}{text}{_RESET}" if self._color else text

    def _end_live_line(self) -> None:
        if self._live_line:
            self._write("")

    def _write(self, text: str) -> None:
        # One write a line: ranks of a node that share a stderr do not tear each other's lines.
        self._target.write((_CLEAR_LINE if self._live_line else "") + text)
        self._target.flush()
        self._live_line = False


class Phase:
    """A phase that is under way; made by `Console.phase`."""

    def __init__(self, console: Console, text: str, clock: Callable[[], float]) -> None:
        self._console = console
        self._text = text
        self._clock = clock
        self._said_at = clock()

    def update(self, done: int, *, total: int) -> None:
        """Shows how far it is, ``measuring units 3/12``: in place on a terminal, else every 10 s."""
        text = f"{self._text} {done}/{total}"
        if self._console.rewrite(text):
            return
        now = self._clock()
        if now - self._said_at >= _BETWEEN_PARTS_S:
            self._said_at = now
            self._console.status(text)


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() not in ("", "0", "false", "no")
