"""Times every action when each rank works alone: the longest path through a graph.

A rank runs its row in order. An action starts when the previous one has ended and its messages have arrived::

    rank 0   [  0F0  ][  0F1  ]
    message           [ way to rank 1 ]
    rank 1                             [  1F0  ]

Messages in transit: each channel carries one after another, and latencies overlap.

::

    action           [  0F0  ][  0F1  ]
    channel                   [ bytes of 0F0 ][ bytes of 0F1 ]
    arrival                                  ' latency '      ' latency '

Times every action when ranks share CPU cores: processor sharing, from event to event.

All actions running on one node progress at one rate, min(1, cores / running). So each node keeps a *virtual
clock* that advances at that rate: an action of w seconds ends when the clock has advanced by w. The order in
which actions end is fixed when they start, which makes the replay exact and cheap::

    time            0    1    2    3         2 ranks on 1 core
    running         1    2    2    0         rank 0 starts 2 s of work at 0, rank 1 starts 1 s at 1
    virtual clock   0    1   1.5   2         both end when the clock shows 2
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardwright.errors import ScheduleError
from shardwright.schedule.action_graph import ActionGraph
from shardwright.schedule.actions import COMPUTE, Kind, StageCost

Price = tuple[float, float]
"""Seconds that a message occupies its channel, and the latency that follows."""

_Departure = tuple[int, int, float, float]
"""A message: the number of the action that waits for it, its price, when it left and when it arrived."""


class _Mail:
    """Sends the messages of a graph and keeps a record of them."""

    __slots__ = ("_free", "_prices", "_sends", "departures")

    def __init__(self, graph: ActionGraph, prices: Sequence[Price]) -> None:
        self._sends = graph.sends
        self._prices = prices or [(0.0, 0.0)] * graph.num_prices
        self._free = [0.0] * len(graph.channels)  # when each channel has sent all it was given
        self.departures: list[_Departure] = []

    def occupy(self, channel: int, now: float, seconds: float) -> float:
        """Has a channel busy for so long from now on, or from when it is free; gives the end."""
        end = max(now, self._free[channel]) + seconds
        self._free[channel] = end
        return end

    def send(self, number: int, now: float) -> list[_Departure]:
        """The messages of an action that ends now, in order."""
        departures = []
        for consumer, channel, price in self._sends[number]:
            occupied_s, latency_s = self._prices[price]
            leaves = max(now, self._free[channel])
            self._free[channel] = leaves + occupied_s
            departures.append((consumer, price, leaves, leaves + occupied_s + latency_s))
        self.departures += departures
        return departures


@dataclass(slots=True)
class Timeline:
    """Start and end of every action of a graph, and every message, in seconds."""

    starts: list[float]
    ends: list[float]
    departures: list[_Departure] = field(default_factory=list)

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
    mail, hosts = _Mail(graph, prices), graph.host_channels
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
        _refuse_stuck(graph, waiting)
    return Timeline(starts, ends, mail.departures)


def _refuse_stuck(graph: ActionGraph, waiting: Mapping[int, int]) -> None:
    """Raises the error of a graph in which the actions `waiting` (number -> rank) never start."""
    stands = sorted((rank, str(graph.actions[number])) for number, rank in waiting.items())
    rank, action = stands[0]
    held = ", ".join(f"rank {r} at {a}" for r, a in stands)
    raise ScheduleError(
        f"the schedule deadlocks: {action} on rank {rank} waits for ever. "
        f"Where the ranks stand: {held}. Reorder the rows so that each action comes after those it needs."
    )


def replay_on_shared_cores(
    graph: ActionGraph,
    seconds: Sequence[float],
    prices: Sequence[Price] = (),
    *,
    beside: Mapping[int, float] = MappingProxyType({}),
    nodes: Sequence[int],
    cores: int,
) -> Timeline:
    """Times of all actions; the arguments and errors of `replay`, and:"""
    return _SharedReplay(graph, seconds, prices, beside, nodes, cores).run()


class _Node:
    """The cores of one node and what runs on them."""

    __slots__ = ("clock", "cores", "running", "time")

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.clock = 0.0  # virtual seconds
        self.time = 0.0  # when the clock was read last
        self.running: list[tuple[float, int]] = []  # (clock at its end, rank)

    @property
    def rate(self) -> float:
        return min(1.0, self.cores / len(self.running))

    def advance(self, time: float) -> None:
        if self.running:
            self.clock += (time - self.time) * self.rate
        self.time = time

    def next_end(self) -> float:
        return self.time + (self.running[0][0] - self.clock) / self.rate


class _SharedReplay:
    def __init__(
        self,
        graph: ActionGraph,
        seconds: Sequence[float],
        prices: Sequence[Price],
        beside: Mapping[int, float],
        nodes: Sequence[int],
        cores: int,
    ) -> None:
        self.graph = graph
        self.seconds = seconds
        self.mail = _Mail(graph, prices)
        self.beside = beside
        self.hosts = graph.host_channels
        self.copied = [0.0] * len(graph.rows)  # when the copies beside the action of each rank have ended
        self.late: list[tuple[float, int]] = []  # (time, rank) of actions whose copies alone are left
        self.rank_of = [rank for rank, row in enumerate(graph.rows) for _ in row]
        self.node_of = nodes
        self.nodes = [_Node(cores) for _ in range(max(nodes) + 1)]
        self.position = [row.start for row in graph.rows]
        self.is_running = [False] * len(graph.rows)
        self.missing = list(graph.num_inputs)
        self.arrivals: list[tuple[float, int, int]] = []  # (time, action that waits, rank it runs on)
        self.timeline = Timeline([0.0] * len(seconds), [0.0] * len(seconds), self.mail.departures)

    def run(self) -> Timeline:
        for rank in range(len(self.position)):
            self._try_start(rank, 0.0)
        while True:
            ends = [(node.next_end(), i) for i, node in enumerate(self.nodes) if node.running]
            end, which = min(ends, default=(float("inf"), -1))
            if self.late and self.late[0][0] <= min(end, self.arrivals[0][0] if self.arrivals else end):
                self._end(*heapq.heappop(self.late))
            elif self.arrivals and self.arrivals[0][0] <= end:
                time, number, rank = heapq.heappop(self.arrivals)
                self.missing[number] -= 1
                self._try_start(rank, time)
            elif which >= 0:
                self._finish(self.nodes[which], end)
            else:
                break
        stuck = {
            number: rank for rank, number in enumerate(self.position) if number < self.graph.rows[rank].stop
        }
        if stuck:
            _refuse_stuck(self.graph, stuck)
        return self.timeline

    def _try_start(self, rank: int, time: float) -> None:
        number = self.position[rank]
        if self.is_running[rank] or number == self.graph.rows[rank].stop or self.missing[number]:
            return
        node = self.nodes[self.node_of[rank]]
        node.advance(time)
        heapq.heappush(node.running, (node.clock + self.seconds[number], rank))
        self.is_running[rank] = True
        self.timeline.starts[number] = time
        if number in self.beside:
            self.copied[rank] = self.mail.occupy(self.hosts[rank], time, self.beside[number])

    def _finish(self, node: _Node, time: float) -> None:
        node.advance(time)
        clock, rank = heapq.heappop(node.running)
        node.clock = clock  # exactly, lest rounding errors add up
        if self.copied[rank] > time:
            heapq.heappush(self.late, (self.copied[rank], rank))
        else:
            self._end(time, rank)

    def _end(self, time: float, rank: int) -> None:
        number = self.position[rank]
        self.timeline.ends[number] = time
        self.is_running[rank] = False
        self.position[rank] += 1
        for consumer, _, _, arrives in self.mail.send(number, time):
            heapq.heappush(self.arrivals, (arrives, consumer, self.rank_of[consumer]))
        self._try_start(rank, time)
