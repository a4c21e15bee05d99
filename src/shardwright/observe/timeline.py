"""The timeline of a step: when each action ran, the idle share of ranks, and Chrome trace JSON of it.

One process per rank, with two threads: the plan's prediction above the measurement. Where a stage offloads
what it keeps, each has a second one for the copies, which run beside::

    rank 0 (stages 0, 2)   predicted | 0F0 0F1 2F0 ...
                           measured  | 0F0 0F1 wait 2F0 ...
                           measured, host copies | 0OFFLOAD0 ...
                           memory in use (bytes), measured

Times are whole microseconds: Perfetto reads fractions as binary numbers and may then find that one action
begins before the last has ended.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.errors import ScheduleError
from shardwright.schedule import Action, Kind, Simulation
from shardwright.schedule.actions import HOST_COPIES

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


def idle_share(busy_s: Sequence[float], *, step_s: float) -> float:
    """The idle share of the ranks' time, 0 to 1: ``1 - sum(busy) / (ranks * step)``.

    Waiting is idle: a rank that holds an action up because its input is on the way does nothing.

    >>> idle_share([1.0, 2.0], step_s=2.0)
    0.25
    """
    if not busy_s or step_s <= 0:
        return 0.0
    # Clocks of several ranks never agree to the last digit: a full step must not show as -0.01 %.
    return min(1.0, max(0.0, 1.0 - sum(busy_s) / (len(busy_s) * step_s)))


HOST_LANE = ", host copies"
"""Behind the name of a timeline: the thread on which its copies to the host and back are drawn."""

MEMORY_IN_USE = "memory in use, measured (bytes)"

_CATEGORIES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "backward weight",
    Kind.OFFLOAD: "offload",
    Kind.LOAD: "load",
}


@dataclass(frozen=True, slots=True)
class _Timeline:
    """One of the two timelines.

    Attributes:
        thread: number of its thread in every process, from 1 (older Perfettos take 0 and 1 for one).
        events: aligned, so that the step begins at 0.
    """

    name: str
    thread: int
    events: Sequence[MeasuredEvent]

    @property
    def copies(self) -> int:
        """The number of the thread for copies to the host and back."""
        return self.thread + 2

    def thread_of(self, action: Action) -> int:
        return self.copies if action.kind in HOST_COPIES else self.thread

    def has_copies(self, rank: int) -> bool:
        return any(event.rank == rank and event.action.kind in HOST_COPIES for event in self.events)


def chrome_trace(
    measured: Iterable[MeasuredEvent],
    *,
    simulation: Simulation | None = None,
    world_ranks: Sequence[int] | None = None,
    info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The timelines of one step, ready for `json.dump`."""
    timelines = [_Timeline("measured", 2, aligned(measured))]
    if simulation is not None:
        predicted = [MeasuredEvent(*event) for event in (*simulation.events, *simulation.host_copies)]
        timelines.insert(0, _Timeline("predicted", 1, aligned(predicted)))
    pid_of = {
        rank: rank if world_ranks is None else world_ranks[rank]
        for rank in sorted({event.rank for timeline in timelines for event in timeline.events})
    }
    events = list(_names(timelines, pid_of))
    for timeline in timelines:
        for event in timeline.events:
            events += _slices(event, timeline, pid_of[event.rank])
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(info or {})}


def aligned(events: Iterable[MeasuredEvent]) -> list[MeasuredEvent]:
    """In order of time, with the start of the first work at 0; what was waited before is cut off."""
    ordered = sorted(events, key=lambda event: (event.work_start_s, event.rank, event.end_s))
    zero = ordered[0].work_start_s if ordered else 0.0
    found = []
    for event in ordered:
        start = max(0.0, event.start_s - zero)
        waited = max(0.0, event.work_start_s - zero - start)
        found.append(event._replace(start_s=start, end_s=event.end_s - zero, waited_s=waited))
    return found


def _names(timelines: Sequence[_Timeline], pid_of: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Names of processes and threads, and the order in which they are shown."""
    for rank, pid in pid_of.items():
        stages = {e.action.stage for timeline in timelines for e in timeline.events if e.rank == rank}
        listed = ", ".join(map(str, sorted(stages)))
        title = f"rank {pid} (stage{'s' if len(stages) > 1 else ''} {listed})"
        process = {"ph": "M", "pid": pid}
        yield {**process, "name": "process_name", "args": {"name": title}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": rank}}
        for timeline in timelines:
            threads = {timeline.thread: timeline.name}
            if timeline.has_copies(rank):
                threads[timeline.copies] = f"{timeline.name}{HOST_LANE}"
            for number, name in threads.items():
                thread = {**process, "tid": number}
                yield {**thread, "name": "thread_name", "args": {"name": name}}
                yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}


def _slices(event: MeasuredEvent, timeline: _Timeline, pid: int) -> Iterator[dict[str, Any]]:
    """The waiting, if there was any, the work, and the memory in use at its end, where it was sampled."""
    work_us = _us(event.work_start_s)
    start_us, end_us = _us(event.start_s), _us(event.end_s)
    if work_us > start_us:
        waits = {"for": str(event.action)}
        yield _slice("wait", "wait", (start_us, work_us), timeline.thread, pid, waits)
    action = event.action
    args = {"stage": action.stage, "microbatch": action.microbatch, "kind": action.kind.value}
    category = _CATEGORIES.get(action.kind, "transfer")
    yield _slice(str(action), category, (work_us, end_us), timeline.thread_of(action), pid, args)
    if event.bytes_in_use:
        in_use = {"bytes": event.bytes_in_use}
        yield {"ph": "C", "name": MEMORY_IN_USE, "pid": pid, "ts": end_us, "args": in_use}


def _slice(
    name: str, category: str, span_us: tuple[int, int], thread: int, pid: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": thread,
        "ts": span_us[0],
        "dur": max(0, span_us[1] - span_us[0]),
        "args": args,
    }


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
