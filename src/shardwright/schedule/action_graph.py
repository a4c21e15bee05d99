"""Copies a stage's kept activations to host memory, and back.

::

    rank 0    [ 0F0 ][ 0F1 ]      [ 0B1 ]      [ 0B0 ]
    its host         [ OFFLOAD 0 ]      [ LOAD 0 ]

Each rank has one channel to its host: copies in either direction wait for one another, in the order of its
row.

A schedule compiled for replay: numbered actions and the messages between them.

The compute actions of all rows are numbered. A dependency across ranks is a message from one action to
another. A dependency on one rank needs no message, only the right order in the row, which is checked here::

    row of rank 0     0F0 -----------------> 0B0         numbers 0, 1
                       |  message 0->1        ^
                       v                      |  message 1->0
    row of rank 1     1F0 -> 1B0 -------------'          numbers 2, 3
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import HOST_COPIES, Action, Edge, Kind

_Key = tuple[int, int]  # stage, microbatch


def row_with_host_copies(row: Sequence[Action], stages: Collection[int]) -> tuple[Action, ...]:
    """Adds the copies of what some stages keep.

    ``OFFLOAD`` stands behind the forward, ``LOAD`` one compute action before the backward: where that follows
    its forward, between the two.

    >>> from shardwright.schedule import build_schedule
    >>> row = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=2).actions[0]
    >>> " ".join(map(str, row_with_host_copies(row, {0})))
    '0F0 0OFFLOAD0 0LOAD0 0F1 0OFFLOAD1 0LOAD1 0B0 0B1'
    """
    found: list[Action] = []
    latest = 0  # place of the compute action before
    for action in row:
        copies = action.stage in stages
        if copies and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            behind = found.index(Action(Kind.OFFLOAD, action.stage, action.microbatch)) + 1
            found.insert(max(latest, behind), Action(Kind.LOAD, action.stage, action.microbatch))
        latest = len(found)
        found.append(action)
        if copies and action.kind is Kind.FORWARD:
            found.append(Action(Kind.OFFLOAD, action.stage, action.microbatch))
    return tuple(found)


def _check_host_copies(row: Sequence[Action], rank: int) -> None:
    """Refuses copies that no run could make.

    What a forward keeps is offloaded once, after it, and loaded once before the backward (``B``, or ``I``).
    """
    if not any(action.kind in HOST_COPIES for action in row):
        return
    kept: set[_Key] = set()  # on the device, by a forward, and not loaded
    offloaded: set[_Key] = set()
    for action in row:
        key = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            kept.add(key)
        elif action.kind is Kind.OFFLOAD:
            if key not in kept:
                _refuse_copy(
                    rank, action, "nothing is kept then that was not offloaded before", "Put it after its F"
                )
            kept.discard(key)
            offloaded.add(key)
        elif action.kind is Kind.LOAD:
            if key not in offloaded:
                _refuse_copy(rank, action, "nothing is offloaded then", "Put it after its OFFLOAD")
            offloaded.discard(key)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            if key in offloaded:
                _refuse_copy(rank, action, "what it needs is in the host's memory", "Put the LOAD before it")
            kept.discard(key)
    for stage, microbatch in sorted(offloaded):
        action = Action(Kind.OFFLOAD, stage, microbatch)
        _refuse_copy(rank, action, "nothing loads it again", "Add its LOAD before the backward, or remove it")


def _refuse_copy(rank: int, action: Action, why: str, remedy: str) -> NoReturn:
    raise ScheduleError(f"rank {rank}: {action}: {why}. {remedy}.")


_Message = tuple[int, int, int]
"""The action that waits for it, the channel it takes, the number of its price.

Prices: 2 * edge for a value, + 1 for its gradient; behind all edges, 4 * stage for an offload, + 1 for a
load; 2 more where no action stands between the two, so that what is about to leave may stay.
"""


@dataclass(slots=True)
class ActionGraph:
    """Numbered compute actions and the messages between them.

    Attributes:
        sends: the messages that leave when an action ends, in order.
        num_inputs: the messages that an action waits for.
        channels: sending and receiving rank of each channel; of one to a host, the rank twice.
        num_prices: prices of messages: two for each edge, four for each stage.
        first_copy: number of the first price of a copy to a host; those before are prices of edges.
        copies: copies to and from the host that start when an action ends, in order.
    """

    actions: list[Action] = field(default_factory=list)
    rows: list[range] = field(default_factory=list)
    sends: list[list[_Message]] = field(default_factory=list)
    num_inputs: list[int] = field(default_factory=list)
    channels: list[tuple[int, int]] = field(default_factory=list)
    num_prices: int = 0
    first_copy: int = 0
    copies: dict[int, list[Action]] = field(default_factory=dict)

    @property
    def host_channels(self) -> dict[int, int]:
        """For each rank that copies to its host, the number of the channel."""
        return {sender: i for i, (sender, receiver) in enumerate(self.channels) if sender == receiver}


def host_copies_of(
    graph: ActionGraph, departures: Sequence[tuple[int, int, float, float]]
) -> Iterator[tuple[int, Action, float, float]]:
    """The copies to and from hosts among the messages of a replay: rank, action, start and end."""
    rank_of = {number: rank for rank, row in enumerate(graph.rows) for number in row}
    for consumer, price, leaves_s, ends_s in departures:
        if price >= graph.first_copy:
            kind = Kind.LOAD if price % 2 else Kind.OFFLOAD
            waits = graph.actions[consumer]
            yield rank_of[consumer], Action(kind, waits.stage, waits.microbatch), leaves_s, ends_s


def check_owner(action: Action, rank: int, stage_ranks: Sequence[int], num_microbatches: int) -> None:
    """Refuses an action of a stage or a microbatch that is not there, or of another rank's stage."""
    if not (0 <= action.stage < len(stage_ranks) and 0 <= action.microbatch < num_microbatches):
        raise ScheduleError(
            f"rank {rank} holds {action}, but there are {len(stage_ranks)} stages and {num_microbatches} "
            "microbatches, numbered from 0. Remove it."
        )
    if stage_ranks[action.stage] != rank:
        raise ScheduleError(
            f"rank {rank} holds {action}, but stage {action.stage} is on rank {stage_ranks[action.stage]}. "
            "Move the action there."
        )


class _Compiler:
    """Holds the tables while a graph is made."""

    def __init__(self, stage_ranks: Sequence[int], num_microbatches: int, edges: Sequence[Edge]) -> None:
        self.ranks = stage_ranks
        self.m = num_microbatches
        size = len(stage_ranks) * num_microbatches
        self.forward = [-1] * size  # number of F(stage, microbatch) at stage * m + microbatch
        self.backward = [-1] * size  # of B, or of I where it is split
        self.weight = [-1] * size  # of W
        self.edges = edges
        self.graph = ActionGraph(num_prices=2 * len(edges) + 4 * len(stage_ranks), first_copy=2 * len(edges))
        self.channel_of: dict[tuple[int, int], int] = {}

    def number(self, rows: Sequence[Sequence[Action]]) -> None:
        """Numbers the compute actions."""
        actions, m = self.graph.actions, self.m
        for rank, row in enumerate(rows):
            first = len(actions)
            for action in row:
                kind = action.kind
                if kind is Kind.FORWARD:
                    table = self.forward
                elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
                    table = self.backward
                elif kind is Kind.BACKWARD_WEIGHT:
                    table = self.weight
                else:
                    continue
                check_owner(action, rank, self.ranks, self.m)
                key = action.stage * m + action.microbatch
                if table[key] >= 0:
                    raise ScheduleError(f"rank {rank} runs {action} twice. Remove one of the two.")
                table[key] = len(actions)
                actions.append(action)
            self.graph.rows.append(range(first, len(actions)))
        self.graph.sends = [[] for _ in actions]
        self.graph.num_inputs = [0] * len(actions)

    def check_complete(self) -> None:
        """Refuses rows that leave out a microbatch of some stage."""
        has_backward = max(self.backward) >= 0 or max(self.weight) >= 0
        for key, forward in enumerate(self.forward):
            backward, weight = self.backward[key], self.weight[key]
            is_split = backward >= 0 and self.graph.actions[backward].kind is Kind.BACKWARD_INPUT
            if forward < 0:
                self._refuse_missing(Kind.FORWARD, key)
            if backward < 0 and has_backward:
                self._refuse_missing(Kind.BACKWARD if weight < 0 else Kind.BACKWARD_INPUT, key)
            if is_split and weight < 0:
                self._refuse_missing(Kind.BACKWARD_WEIGHT, key)
            if weight >= 0 and not is_split:
                whole, half = self.graph.actions[backward], self.graph.actions[weight]
                raise ScheduleError(f"{whole} and its half {half} are both there. Keep B, or I and W.")

    def _refuse_missing(self, kind: Kind, key: int) -> None:
        stage, microbatch = divmod(key, self.m)
        raise ScheduleError(
            f"{Action(kind, stage, microbatch)} is missing. "
            f"Add it to the row of rank {self.ranks[stage]}, which runs stage {stage}."
        )

    def check_rows(self) -> None:
        """Refuses rows in which an action stands before another of the same rank that it needs."""
        for table, earlier in ((self.backward, self.forward), (self.weight, self.backward)):
            for number, need in zip(table, earlier, strict=True):
                if 0 <= number < need:
                    self._refuse(number, need)
        m = self.m
        for edge in self.edges:
            if self.ranks[edge.source] != self.ranks[edge.target]:
                continue
            for microbatch in range(m):
                source, target = edge.source * m + microbatch, edge.target * m + microbatch
                self._check_pair(self.forward[source], self.forward[target])
                if edge.has_gradient:
                    self._check_pair(self.backward[target], self.backward[source])

    def _check_pair(self, first: int, second: int) -> None:
        if second < first:
            self._refuse(second, first)

    def _refuse(self, number: int, need: int) -> None:
        actions = self.graph.actions
        raise ScheduleError(
            f"{actions[number]} needs {actions[need]}, which comes after it. Put it later in its row."
        )

    def derive_messages(self) -> None:
        """Adds the messages that the edges ask for, each right after the action that makes it."""
        outputs, gradients = self._routes()
        graph, m = self.graph, self.m
        for number, action in enumerate(graph.actions):
            if action.kind is Kind.FORWARD:
                routes, table = outputs[action.stage], self.forward
            elif action.kind is not Kind.BACKWARD_WEIGHT:
                routes, table = gradients[action.stage], self.backward
            else:
                continue
            for peer, channel, price in routes:
                consumer = table[peer * m + action.microbatch]
                graph.sends[number].append((consumer, channel, price))
                graph.num_inputs[consumer] += 1

    def read_copies(self, rows: Sequence[Sequence[Action]]) -> None:
        """Takes the copies to and from the host: messages to the backward, which needs both to have ended."""
        for rank, row in enumerate(rows):
            _check_host_copies(row, rank)
            latest, behind = self.graph.rows[rank].start - 1, {}
            for action in row:
                if action.is_compute:
                    latest += 1
                elif action.kind in HOST_COPIES:
                    behind[action] = latest
            for action, latest in behind.items():
                self._read_copy(action, rank, latest, behind)

    def _read_copy(self, action: Action, rank: int, latest: int, behind: Mapping[Action, int]) -> None:
        """Adds the message of a copy that stands behind the action with the number `latest`."""
        ends = [behind[Action(kind, action.stage, action.microbatch)] for kind in (Kind.OFFLOAD, Kind.LOAD)]
        consumer = self.backward[action.stage * self.m + action.microbatch]
        price = self.graph.first_copy + 4 * action.stage + (action.kind is Kind.LOAD)
        price += 2 * (ends[0] == ends[1])
        self.graph.sends[latest].append((consumer, self._channel(rank, rank), price))
        self.graph.num_inputs[consumer] += 1
        self.graph.copies.setdefault(latest, []).append(action)

    def _routes(self) -> tuple[list[list[_Message]], list[list[_Message]]]:
        """For each stage, by peer: where its outputs go, and where the gradients of its inputs go."""
        outputs: list[list[_Message]] = [[] for _ in self.ranks]
        gradients: list[list[_Message]] = [[] for _ in self.ranks]
        for index, edge in enumerate(self.edges):
            source, target = self.ranks[edge.source], self.ranks[edge.target]
            if source == target:
                continue
            outputs[edge.source].append((edge.target, self._channel(source, target), 2 * index))
            if edge.has_gradient:
                gradients[edge.target].append((edge.source, self._channel(target, source), 2 * index + 1))
        return outputs, gradients

    def _channel(self, sender: int, receiver: int) -> int:
        channel = self.channel_of.setdefault((sender, receiver), len(self.channel_of))
        if channel == len(self.graph.channels):
            self.graph.channels.append((sender, receiver))
        return channel


def compile_actions(
    rows: Sequence[Sequence[Action]],
    *,
    stage_ranks: Sequence[int],
    num_microbatches: int,
    edges: Sequence[Edge],
) -> ActionGraph:
    """Numbers the compute actions of all rows and finds the messages that the edges ask for.

    Transfers in the rows are passed over. Copies to and from the host are messages of a rank to itself.
    """
    compiler = _Compiler(stage_ranks, num_microbatches, edges)
    compiler.number(rows)
    compiler.check_complete()
    compiler.check_rows()
    compiler.derive_messages()
    if any(action.kind in HOST_COPIES for row in rows for action in row):
        compiler.read_copies(rows)
    return compiler.graph
