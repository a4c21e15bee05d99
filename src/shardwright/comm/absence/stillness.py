"""How long a thread of this process has been at one place, whether it waits there, and its stack."""

import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

from shardwright.comm.absence.python_place import waits_for_others

__all__ = ["Stillness"]

_FRAMES = 6
"""Innermost functions that must be at the same lines."""
_MOST_LINES = 12


class Stillness:
    """Looks at a thread now and then; another thread calls it."""

    def __init__(self, thread_id: int, *, clock: Callable[[], float] = time.monotonic):
        self._thread_id = thread_id
        self._clock = clock
        self._place: tuple[tuple[int, int], ...] = ()
        self._since_s = clock()

    def look(self) -> None:
        """Notes where the thread is."""
        place = _place(self.frame)
        if place != self._place:
            self._place, self._since_s = place, self._clock()

    @property
    def frame(self) -> FrameType | None:
        """The innermost function of the thread; None if it has ended."""
        return sys._current_frames().get(self._thread_id)

    @property
    def seconds(self) -> float:
        """How long it has been where it was at the last look, at least."""
        return self._clock() - self._since_s

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        frame = self.frame
        return frame is not None and waits_for_others(frame)

    @property
    def stack(self) -> str:
        """Its stack as in a traceback, the innermost function last."""
        frame = self.frame
        if frame is None:
            return ""
        lines = "".join(traceback.format_list(traceback.extract_stack(frame))).rstrip().splitlines()
        return "\n".join(lines[-_MOST_LINES:])


def _place(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    while frame is not None and len(found) < _FRAMES:
        found.append((id(frame.f_code), frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
