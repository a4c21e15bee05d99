"""Copies one output stream of a worker to its log, and line by line to the console."""

import os
import re
import shutil
import time
from typing import BinaryIO

from shardwright.launch.processes.last_words import begins_last_words, is_uncaught
from shardwright.text_folding import cut, folded

__all__ = ["Tee"]

_STDERR = 2
_COLOURED = re.compile(r"((?:\x1b\[\d*m)*)(.*?)((?:\x1b\[\d*m)*)\Z", re.DOTALL)
"""A line, and the colour that it may have as a whole."""
_CHUNK_BYTES = 2**16
_TAIL_BYTES = 2**16
_HOLD_BACK_S = 5.0
_HOLD_BACK_UNCAUGHT_S = 60.0
"""The worker is about to end, which takes seconds on a busy machine."""
_BETWEEN_STATES_S = 10.0
_UP = b"\x1b[A"
"""How tqdm goes back to the bar above."""
_CLEAR_LINE = b"\r\x1b[K"


class Tee:
    """Copies the output of a pipe to a log and, with a prefix, to the console.

    Lines go to the console whole, so that those of different ranks do not mix. A traceback is held back
    for five seconds, or a minute where nobody has caught the error: if the worker dies of it, the launcher's
    report shows it, once and in its place. On a terminal, stderr is folded to its width, and what ends with a
    carriage return, as the states of a progress bar, is shown until the next line; elsewhere one such state
    each 10 s is a line, and the last one.
    """

    def __init__(
        self, pipe_fd: int, *, console_fd: int, prefix: bytes, log: BinaryIO, holds_back: bool
    ) -> None:
        os.set_blocking(pipe_fd, False)
        self.pipe_fd = pipe_fd
        self.is_open = True
        self._console_fd = console_fd
        self._prefix = prefix
        self._log = log
        self._holds_back = holds_back
        self._is_terminal = os.isatty(console_fd)
        self._partial = b""
        self._held: list[bytes] = []
        self._held_until_s: float | None = None
        self._tail = b""
        self._waiting = b""  # the last state of a progress bar that was not shown
        self._next_state_s = 0.0

    @property
    def tail(self) -> str:
        """The last 64 KiB."""
        return self._tail.decode(errors="replace")

    @property
    def release_at_s(self) -> float | None:
        """The time at which lines that are held back are due (`time.monotonic`)."""
        return self._held_until_s

    def copy(self) -> bool:
        """Copies what there is now; returns whether there was anything."""
        try:
            data = os.read(self.pipe_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        self._log.write(data)
        self._log.flush()
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        text = (self._partial + data).replace(b"\r\n", b"\n")
        if not self._is_terminal:
            text = text.replace(_UP, b"")
        *lines, self._partial = text.split(b"\n")
        for line in lines:
            state, self._waiting = _last_state(line) or self._waiting, b""
            if self._is_terminal or state.strip() or b"\r" not in line:  # tqdm wipes its bars with spaces
                self._show(state + b"\n")
        *states, self._partial = self._partial.split(b"\r")
        if state := _last_state(b"\r".join(states)):
            self._show_for_now(state)
        return True

    def release_if_due(self) -> None:
        """Shows lines that were held back long enough: the worker survived what they tell."""
        if self.release_at_s is not None and time.monotonic() >= self.release_at_s:
            self.release()

    def release(self) -> None:
        """Shows the lines held back."""
        for line in self._held:
            self._write(line)
        self.discard_held()

    def discard_held(self) -> None:
        """Forgets the lines held back, which will be shown elsewhere."""
        self._held.clear()
        self._held_until_s = None

    def finish(self) -> None:
        """Copies the rest, including a last line without an end."""
        while self.is_open and self.copy():
            pass
        if self._partial or self._waiting:
            self._show((self._partial or self._waiting) + b"\n")
            self._partial = self._waiting = b""

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        if self._holds_back and self._held_until_s is None and begins_last_words(text):
            wait_s = _HOLD_BACK_UNCAUGHT_S if is_uncaught(text) else _HOLD_BACK_S
            self._held_until_s = time.monotonic() + wait_s
        if self._held_until_s is not None:
            self._held.append(line)
        else:
            self._write(line)

    def _show_for_now(self, state: bytes) -> None:
        """Shows a line that the next one replaces; off a terminal, one each 10 s becomes a line."""
        if not self._is_terminal:
            self._waiting = state
            if time.monotonic() >= self._next_state_s:
                self._next_state_s = time.monotonic() + _BETWEEN_STATES_S
                self._waiting = b""
                self._show(state + b"\n")
            return
        room = shutil.get_terminal_size().columns - 1 - len(self._prefix)
        begin, text, end = _COLOURED.match(state.decode(errors="replace")).groups()  # type: ignore[union-attr]
        self._put(_CLEAR_LINE + self._prefix + f"{begin}{cut(text, max(room, 0))}{end}\r".encode())

    def _write(self, line: bytes) -> None:
        if self._is_terminal and self._console_fd == _STDERR:
            line = self._folded(line)
        clear = _CLEAR_LINE if self._is_terminal else b""
        self._put(clear + self._prefix + line)

    def _folded(self, line: bytes) -> bytes:
        """The line in lines of the terminal's width, below the first and right of the prefix."""
        room = shutil.get_terminal_size().columns - len(self._prefix)
        begin, text, end = _COLOURED.match(line.decode(errors="replace").rstrip("\n")).groups()  # type: ignore[union-attr]
        if not 0 < room < len(text) or not text.isprintable():
            return line
        text = folded(text, room).replace("\n", "\n" + " " * len(self._prefix))
        return f"{begin}{text}{end}\n".encode()

    def _put(self, text: bytes) -> None:
        try:
            os.write(self._console_fd, text)
        except OSError:
            # The console has gone (a closed terminal, a pipe into head). Training goes on, the log has
            # it all.
            self._console_fd = os.open(os.devnull, os.O_WRONLY)


def _last_state(line: bytes) -> bytes:
    """What a terminal shows of a line in the end: behind its last carriage return that something follows."""
    states = [state.removeprefix(b"\x1b[K") for state in line.split(b"\r")]
    return next((state for state in reversed(states) if state), b"")
