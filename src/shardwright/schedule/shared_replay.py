"""Times every action when ranks share CPU cores: processor sharing, from event to event.

All actions running on one node progress at one rate, min(1, cores / running). So each node keeps a *virtual
clock* that advances at that rate: an action of w seconds ends when the clock has advanced by w. The order in
which actions end is fixed when they start, which makes the replay exact and cheap::

    time            0    1    2    3         2 ranks on 1 core
    running         1    2    2    0         rank 0 starts 2 s of work at 0, rank 1 starts 1 s at 1
    virtual clock   0    1   1.5   2         both end when the clock shows 2
"""

import heapq
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shardwright.schedule.action_graph import ActionGraph
from shardwright.schedule.mail import Mail, Price
from shardwright.schedule.replay import Timeline, refuse_stuck

__all__ = ["replay_on_shared_cores"]


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
        self.mail = Mail(graph, prices)
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
            refuse_stuck(self.graph, stuck)
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
