"""The outcome of one rank, and the error that tells which rank failed."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.comm.message_names import names_a_lost_peer
from shardwright.errors import ShardwrightError
from shardwright.testing.job import StopReason


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


_MAX_OUTPUT_LINES = 60


class RanksFailedError(ShardwrightError, RuntimeError):
    """A rank of `run_ranks` raised, died or did not end.

    Attributes:
        outcomes: what became of every rank, in the order of the ranks.
        first: what became of the rank that failed first.
    """

    def __init__(self, outcomes: Sequence[Outcome], *, timeout_s: float) -> None:
        self.outcomes = tuple(outcomes)
        ordered = first_cause_first(outcomes)
        self.first = ordered[0]
        super().__init__(_message(ordered, num_ranks=len(outcomes), timeout_s=timeout_s))


def first_cause_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sorts the failed ranks: causes before consequences, then by the time of failure.

    A rank that only lost its connection comes after the rank that closed it, even where it noticed
    before the server saw the other one die; and a rank that was stopped comes last, unless the timeout
    is all that happened.
    """
    failed = [outcome for outcome in outcomes if not outcome.ok]
    return sorted(failed, key=lambda outcome: (_distance_from_cause(outcome), outcome.seconds))


def _distance_from_cause(outcome: Outcome) -> int:
    if outcome.stopped is not None and outcome.error is None:
        # A rank that SIGSTOP holds is why the others wait.
        return 2 if outcome.was_held else 3
    return 1 if is_consequence(outcome) else 0


def is_consequence(outcome: Outcome) -> bool:
    """Says whether a rank failed because another had gone before."""
    return outcome.error is not None and names_a_lost_peer(outcome.error)


def _message(ordered: Sequence[Outcome], *, num_ranks: int, timeout_s: float) -> str:
    return "\n\n".join(
        [_headline(ordered, num_ranks=num_ranks, timeout_s=timeout_s), *map(_section, ordered)]
    )


def _headline(ordered: Sequence[Outcome], *, num_ranks: int, timeout_s: float) -> str:
    first = ordered[0]
    if first.stopped != "timeout":
        return f"rank {first.rank} of {num_ranks} failed first, after {first.seconds:.2f} s: {first.cause}"
    hanging = ", ".join(str(outcome.rank) for outcome in sorted(ordered, key=lambda outcome: outcome.rank))
    return (
        f"{len(ordered)} of {num_ranks} ranks did not end within {timeout_s:g} s: {hanging}. "
        f"Their Python stacks follow. If they only need longer, pass timeout_s={2 * timeout_s:g}."
    )


def _section(outcome: Outcome) -> str:
    why = " (because another rank had gone)" if is_consequence(outcome) else ""
    if outcome.stopped == "grace":
        why = "; stopped, because another rank had failed"
    what = outcome.error_type or outcome.cause
    lines = [f"--- rank {outcome.rank}, {outcome.seconds:.2f} s: {what}{why}"]
    for title, text in (
        ("", outcome.error or ""),
        ("stacks:", outcome.stacks if outcome.stopped == "timeout" else ""),
        ("stdout:", outcome.stdout),
        ("stderr:", outcome.stderr),
    ):
        if text.strip():
            lines += [*([title] if title else []), _tail(text)]
    return "\n".join(lines)


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) <= _MAX_OUTPUT_LINES:
        return "\n".join(lines)
    return "\n".join(
        [f"[{len(lines) - _MAX_OUTPUT_LINES} earlier lines left out]", *lines[-_MAX_OUTPUT_LINES:]]
    )
