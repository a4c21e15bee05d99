"""The outcome of one rank."""

import signal
from dataclasses import dataclass, field
from typing import Any

from shardwright.testing.job import StopReason

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one rank of a call.

    Attributes:
        rank: which one.
        returned: whether the function returned; then `value` is what it returned.
        error: the traceback, if the function raised.
        error_type: the name of the exception's class, for example ``"ValueError"``.
        error_line: the class and the first line of the message.
        exception: the exception itself, if it can be pickled.
        exit_code: 0, what the rank passed to ``sys.exit`` or ``os._exit``, or minus the number of the
            signal that ended it (-9 for SIGKILL).
        seconds: from the rank's start until its function ended or the rank died.
        stopped: ``"timeout"`` or ``"grace"`` if `run_ranks` killed it, because the time was up or
            another had failed.
        was_held: SIGSTOP held it when it was stopped.
        stdout: what it wrote there, its subprocesses included.
        stderr: likewise.
        stacks: its Python stacks, if it was stopped.
    """

    rank: int
    returned: bool
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    error_line: str | None = None
    exception: BaseException | None = field(default=None, repr=False)
    exit_code: int
    seconds: float
    stopped: StopReason | None = None
    was_held: bool = False
    stdout: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)
    stacks: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        """The function returned and the rank ended as it should."""
        return self.returned and (self.exit_code == 0 or self.stopped is not None)

    @property
    def cause(self) -> str:
        """One line on how the rank ended.

        >>> Outcome(rank=0, returned=False, exit_code=-9, seconds=0.5).cause
        'killed by SIGKILL'
        >>> Outcome(rank=0, returned=False, exit_code=0, seconds=0.5).cause
        'exited with code 0 before its function returned'
        """
        if self.ok:
            return "returned"
        if self.error_line is not None:
            return self.error_line
        if self.stopped is not None:
            return "held by SIGSTOP" if self.was_held else "still running"
        if self.exit_code < 0:
            return f"killed by {_signal_name(-self.exit_code)}"
        when = "after" if self.returned else "before"
        return f"exited with code {self.exit_code} {when} its function returned"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
