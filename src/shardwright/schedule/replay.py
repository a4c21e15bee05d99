"""When everything happens if each rank works alone: the longest path through a program.

A rank runs its row in order. An action starts when the one before it has ended and its messages have arrived.
A message leaves when its action has ended and its channel is free, occupies the channel, and arrives a
latency later::

    rank 0   [  0F0  ][  0F1  ]
    channel           [ bytes / bandwidth ]
    rank 1                                 latency [  1F0  ]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Kind
from shardwright.schedule.program import Program
from shardwright.schedule.stage_cost import StageCost

__all__ = ["Departure", "Timeline", "action_seconds", "refuse_stuck", "replay"]

Departure = tuple[int, int, float, float]
"""A message: the number of the action that waits for it, its price, when it left and when it arrived."""


@dataclass(slots=True)
class Timeline:
    """Start and end of every action of a program, and every message, in seconds."""

    starts: list[float]
    ends: list[float]
    departures: list[Departure] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """End of the last action, seconds."""
        return max(self.ends, default=0.0)


def action_seconds(program: Program, costs: Sequence[StageCost], *, overhead_s: float = 0.0) -> list[float]:
    """Seconds that each action of a program takes on a free device."""
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    by_stage = [{kind: cost.seconds(kind) + overhead_s for kind in kinds} for cost in costs]
    return [by_stage[action.stage][action.kind] for action in program.actions]


def replay(
    program: Program,
    seconds: Sequence[float],
    prices: Sequence[tuple[float, float]] = (),
) -> Timeline:
    """Times of all actions.

    Args:
        program: what to run.
        seconds: of each action.
        prices: for each price of a message, the seconds it occupies its channel and the latency that follows;
            empty where messages take no time.

    Raises:
        ScheduleError: the program stops before its end, because ranks wait for one another.
    """
    starts = [-1.0] * len(seconds)
    ends = [0.0] * len(seconds)
    missing = list(program.num_inputs)
    ready = [0.0] * len(seconds)
    clock = [0.0] * len(program.rows)
    free = [0.0] * len(program.channels)
    departures: list[Departure] = []
    position = [row.start for row in program.rows]
    rank_of_waiting: dict[int, int] = {}
    runnable = list(range(len(program.rows)))[::-1]
    while runnable:
        rank = runnable.pop()
        now, number, stop = clock[rank], position[rank], program.rows[rank].stop
        while number < stop and not missing[number]:
            if ready[number] > now:
                now = ready[number]
            starts[number] = now
            now += seconds[number]
            ends[number] = now
            for consumer, channel, price in program.sends[number]:
                leaves = arrives = now
                if prices:
                    occupied_s, latency_s = prices[price]
                    leaves = max(now, free[channel])
                    free[channel] = leaves + occupied_s
                    arrives = free[channel] + latency_s
                departures.append((consumer, price, leaves, arrives))
                if arrives > ready[consumer]:
                    ready[consumer] = arrives
                missing[consumer] -= 1
                if not missing[consumer] and consumer in rank_of_waiting:
                    runnable.append(rank_of_waiting.pop(consumer))
            number += 1
        clock[rank], position[rank] = now, number
        if number < stop:
            rank_of_waiting[number] = rank
    if rank_of_waiting:
        refuse_stuck(program, rank_of_waiting)
    return Timeline(starts, ends, departures)


def refuse_stuck(program: Program, waiting: dict[int, int]) -> None:
    """Raises the error of a program in which the actions `waiting` (number -> rank) never start."""
    number, rank = min(waiting.items(), key=lambda item: item[1])
    held = ", ".join(
        f"rank {r} at {program.actions[n]}" for n, r in sorted(waiting.items(), key=lambda i: i[1])
    )
    raise ScheduleError(
        f"the schedule deadlocks: {program.actions[number]} on rank {rank} waits for ever. "
        f"Where the ranks stand: {held}. Reorder the rows so that each action comes after those it needs."
    )
