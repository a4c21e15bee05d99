"""The timeline of a step: when each action ran, and the idle share of the ranks."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.errors import ScheduleError
from shardwright.schedule import Action

__all__ = ["MeasuredEvent", "Row", "bubble", "idle_share", "measured_events"]

Row = Sequence[tuple[Action, float, float, float]]
"""What one rank did, in order: action, start, end, seconds spent waiting; seconds on that rank's clock."""


class MeasuredEvent(NamedTuple):
    """One action on the measured timeline.

    Attributes:
        start_s: seconds from the start of the step.
        end_s: seconds from the start of the step.
        waited_s: the part of the time in between in which a message was waited for.
        bytes_in_use: memory of the rank when the action ended; 0: not known.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float
    waited_s: float = 0.0
    bytes_in_use: int = 0

    @property
    def work_start_s(self) -> float:
        """When the waiting is over.

        How long was waited is known, not when. Messages are asked for when an action begins, so the waiting
        is taken to come first.
        """
        return min(self.end_s, self.start_s + max(0.0, self.waited_s))

    @property
    def busy_s(self) -> float:
        """Seconds of work, waiting left out."""
        return self.end_s - self.work_start_s


def measured_events(
    rows: Sequence[Row], *, step_starts: Sequence[float], memory: Sequence[Sequence[int]] | None = None
) -> list[MeasuredEvent]:
    """Brings what all ranks measured onto one clock that starts with the step."""
    memory = memory or [()] * len(rows)
    if len(rows) != len(step_starts):
        raise ScheduleError(f"{len(rows)} rows have {len(step_starts)} starts. Give one for each rank.")
    return [
        MeasuredEvent(rank, action, start - zero, end - zero, waited, looked[number] if looked else 0)
        for rank, (row, zero, looked) in enumerate(zip(rows, step_starts, memory, strict=True))
        for number, (action, start, end, waited) in enumerate(row)
    ]


def bubble(events: Sequence[MeasuredEvent], *, num_ranks: int, step_s: float | None = None) -> float:
    """The idle share of the ranks' time, 0 to 1: ``1 - sum(busy) / (ranks * step)``.

    Waiting is idle: a rank that holds an action up because its input is on the way does nothing.

    >>> from shardwright.schedule import Kind
    >>> forward = Action(Kind.FORWARD, 0, 0)
    >>> bubble([MeasuredEvent(0, forward, 0, 4), MeasuredEvent(1, forward, 0, 4, 2)], num_ranks=2)
    0.25
    """
    if step_s is None:
        first = min((event.work_start_s for event in events), default=0.0)
        step_s = max((event.end_s for event in events), default=0.0) - first
    busy_s = [0.0] * num_ranks
    for event in events:
        busy_s[event.rank] += event.busy_s
    return idle_share(busy_s, step_s=step_s)


def idle_share(busy_s: Sequence[float], *, step_s: float) -> float:
    """The same from sums, for ranks that exchange only how long they were busy.

    >>> idle_share([1.0, 2.0], step_s=2.0)
    0.25
    """
    if not busy_s or step_s <= 0:
        return 0.0
    # Clocks of several ranks never agree to the last digit: a full step must not show as -0.01 %.
    return min(1.0, max(0.0, 1.0 - sum(busy_s) / (len(busy_s) * step_s)))
