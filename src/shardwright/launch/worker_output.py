"""The output of a worker: copied to its log and the console; its last words, without our own frames."""

import os
import re
import shutil
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import shardwright
from shardwright.text import cut, folded

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


_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"
# torch.distributed puts the rank before each line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?", re.MULTILINE)
_CHAIN = re.compile(rf"{CHAIN}\s*$")
# A run that ends on an error still says how far it has come, and what it came to, below the traceback.
_OF_END = "  (?:the step took|productive|rank \\d+ kept|report|saved) |saved "
_PROGRESS = re.compile(
    rf"(?:\n+(?:step \d+ \| |(?:done|stopped|failed): \d+ steps?\b|{_OF_END})[^\n]*)+\s*\Z"
)
# Where a script has been started by code that is in no file (`ranks.standby`), its traceback begins there.
_IN_NO_FILE = r'  File "<string>", line 1, in <module>\n(?: {4}.*\n)*'
_STARTER = re.compile(rf"^{re.escape(_TRACEBACK)}\n(?:{_IN_NO_FILE})+", re.MULTILINE)
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
    traceback = _STARTER.sub(f"{_TRACEBACK}\n", _PROGRESS.sub("", text[start:])).rstrip()
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
