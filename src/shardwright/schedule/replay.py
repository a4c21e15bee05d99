"""Times every action when each rank works alone: the longest path through a graph.

A rank runs its row in order. An action starts when the previous one has ended and its messages have arrived::

    rank 0   [  0F0  ][  0F1  ]
    message           [ way to rank 1 ]
    rank 1                             [  1F0  ]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardwright.errors import ScheduleError
from shardwright.schedule.action_graph import ActionGraph
from shardwright.schedule.actions import COMPUTE, Kind
from shardwright.schedule.mail import Departure, Mail, Price
from shardwright.schedule.stage_cost import StageCost

__all__ = ["Handling", "Timeline", "action_seconds", "refuse_stuck", "replay"]


@dataclass(slots=True)
class Timeline:
    """Start and end of every action of a graph, and every message, in seconds."""

    starts: list[float]
    ends: list[float]
    departures: list[Departure] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """End of the last action, seconds."""
        return max(self.ends, default=0.0)


Handling = tuple[float, float]
"""Seconds in which messages occupy the core of a stage in a microbatch: forward, backward."""


def action_seconds(
    graph: ActionGraph,
    costs: Sequence[StageCost],
    *,
    overhead_s: float = 0.0,
    forward_overhead_s: float = 0.0,
    handling: Sequence[Handling] = (),
) -> list[float]:
    """Seconds that each action of a graph takes on a free device."""
    by_stage = [{kind: cost.seconds(kind) + overhead_s for kind in COMPUTE} for cost in costs]
    for seconds in by_stage:
        seconds[Kind.FORWARD] += forward_overhead_s
    for seconds, (forward_s, backward_s) in zip(by_stage, handling, strict=False):
        seconds[Kind.FORWARD] += forward_s
        seconds[Kind.BACKWARD] += backward_s
        seconds[Kind.BACKWARD_INPUT] += backward_s
    return [by_stage[action.stage][action.kind] for action in graph.actions]


def replay(
    graph: ActionGraph,
    seconds: Sequence[float],
    prices: Sequence[Price] = (),
    beside: Mapping[int, float] = MappingProxyType({}),
) -> Timeline:
    """Times of all actions."""
    mail, hosts = Mail(graph, prices), graph.host_channels
    starts, ends = [0.0] * len(seconds), [0.0] * len(seconds)
    ready = [0.0] * len(seconds)  # when the last message so far has arrived
    missing = list(graph.num_inputs)
    clock = [0.0] * len(graph.rows)
    position = [row.start for row in graph.rows]
    waiting: dict[int, int] = {}  # number of an action that lacks messages -> its rank
    runnable = list(range(len(graph.rows)))
    while runnable:
        rank = runnable.pop()
        now, number, stop = clock[rank], position[rank], graph.rows[rank].stop
        while number < stop and not missing[number]:
            starts[number] = max(now, ready[number])
            now = starts[number] + seconds[number]
            if number in beside:
                now = max(now, mail.occupy(hosts[rank], starts[number], beside[number]))
            ends[number] = now
            for consumer, _, _, arrives in mail.send(number, now):
                ready[consumer] = max(ready[consumer], arrives)
                missing[consumer] -= 1
                if not missing[consumer] and consumer in waiting:
                    runnable.append(waiting.pop(consumer))
            number += 1
        clock[rank], position[rank] = now, number
        if number < stop:
            waiting[number] = rank
    if waiting:
        refuse_stuck(graph, waiting)
    return Timeline(starts, ends, mail.departures)


def refuse_stuck(graph: ActionGraph, waiting: Mapping[int, int]) -> None:
    """Raises the error of a graph in which the actions `waiting` (number -> rank) never start."""
    stands = sorted((rank, str(graph.actions[number])) for number, rank in waiting.items())
    rank, action = stands[0]
    held = ", ".join(f"rank {r} at {a}" for r, a in stands)
    raise ScheduleError(
        f"the schedule deadlocks: {action} on rank {rank} waits for ever. "
        f"Where the ranks stand: {held}. Reorder the rows so that each action comes after those it needs."
    )
