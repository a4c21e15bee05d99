"""Handles the signals that ask a run to save and exit: SIGTERM, SIGUSR1 and Ctrl-C."""

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from shardwright.errors import UsageError

__all__ = ["SaveSignals"]

_ALLOWED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")


class SaveSignals:
    """Notes that a signal came; somebody looks between two steps.

    A second Ctrl-C ends the process as ever. Children that the process forks (workers of a data loader) pass
    over SIGINT and SIGUSR1, which a terminal or a launcher sends to all: the process still needs them.

    Attributes:
        came: number of the first that came; 0 as long as none has.
    """

    def __init__(self, names: Iterable[str], *, says: bool = True):
        self.came = 0
        self._says = says
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers in the main thread alone
        for name in [names] if isinstance(names, str) else names:
            if name not in _ALLOWED:
                raise UsageError(
                    f"signals has {name!r}, and may have {', '.join(_ALLOWED)}, as in "
                    "signals=('SIGTERM', 'SIGUSR1')."
                )
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Puts the handlers back that there were before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            if number == signal.SIGTERM:  # somebody ends this child
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and self.came:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._says:
            os.write(2, b"saving at the end of this step; Ctrl-C again ends at once\n")
        self.came = self.came or number
