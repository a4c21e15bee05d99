"""Adds sends and receives to a schedule.

A ``SEND`` is enqueued right after the action that makes its tensor. A ``RECV`` is posted, without waiting,
some actions before the one that uses it, which then waits. All messages from one rank to another, of either
kind, form one queue, its *channel*: receives are posted in the order of the sends, which NCCL needs::

    1f1b, 2 ranks, 3 microbatches, lookahead 2; each receive is posted before its send

    rank 0 | 0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0RECV_B2 0F2 0SEND_F2 0B1 0B2
    rank 1 | 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2

A receive is never posted later than its message is made: in the replay of the compute actions, it comes
before any action that starts no earlier than the one that makes the message. So the rows can be run, one
action at a time in the order of that replay, with every receive posted before its send; even sends that block
until their receive is posted cannot deadlock (`validate` proves it for each schedule).

The two directions between two ranks are separate channels. On NCCL each needs a communicator of its own: in a
shared stream, an early receive would hold up the send behind it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from shardwright.errors import ScheduleError
from shardwright.schedule.action_graph import ActionGraph, compile_actions
from shardwright.schedule.actions import Action, Edge, Kind, check_edges, unit_costs
from shardwright.schedule.replay import action_seconds, replay
from shardwright.schedule.schedule import Schedule


def lower(schedule: Schedule, edges: Sequence[Edge] | None = None, *, lookahead: int = 2) -> Schedule:
    """Adds the transfers that the edges ask for.

    Args:
        schedule: compute actions, and copies to the host, which stay behind what they stand behind.
        edges: which stages feed which; None where each feeds the next. Edges within a rank make no transfer.
            Several messages of one action go in the order of their peer stages.
        lookahead: a receive is posted at least this many compute actions before its use, where there are as
            many.

    Raises:
        ScheduleError: the schedule has transfers already, an edge is impossible, or the compute actions
            deadlock.

    >>> from shardwright.schedule import build_schedule
    >>> print(lower(build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=1)))
    rank 0 | 0RECV_B0 0F0 0SEND_F0 0B0
    rank 1 | 1RECV_F0 1F0 1B0 1SEND_B0
    """
    if schedule.has_transfers:
        raise ScheduleError(
            f"schedule {schedule.kind!r} has sends and receives already. Lower the one without them."
        )
    if lookahead < 0:
        raise ScheduleError(f"lookahead is {lookahead}. Give 0 (post right before the use) or more.")
    edges = check_edges(edges, num_stages=schedule.num_stages)
    graph = compile_actions(
        schedule.actions,
        stage_ranks=schedule.stage_ranks,
        num_microbatches=schedule.num_microbatches,
        edges=edges,
    )
    starts = replay(graph, action_seconds(graph, unit_costs(schedule.num_stages))).starts
    receives = _place_receives(graph, starts, lookahead)
    rows = []
    for row in graph.rows:
        actions: list[Action] = []
        for number in row:
            actions += receives[number]
            actions.append(graph.actions[number])
            sends = (message for message in graph.sends[number] if message[2] < graph.first_copy)
            actions += [_send(graph, number, message[0]) for message in sends]
            actions += graph.copies.get(number, ())
        rows.append(tuple(actions))
    return replace(schedule, actions=tuple(rows))


def _place_receives(graph: ActionGraph, starts: Sequence[float], lookahead: int) -> list[list[Action]]:
    """The receives to post before each action."""
    queues: list[list[tuple[int, int]]] = [[] for _ in graph.channels]
    for producer, messages in enumerate(graph.sends):
        for consumer, channel, price in messages:
            if price < graph.first_copy:
                queues[channel].append((producer, consumer))
    posts: list[list[tuple[float, int, int, Action]]] = [[] for _ in graph.actions]
    for channel, queue in enumerate(queues):
        row = graph.rows[graph.channels[channel][1]]
        row_starts = starts[row.start : row.stop]
        latest = row.stop
        # Backwards through the queue, so that no receive is posted after one that must come later.
        for place in range(len(queue) - 1, -1, -1):
            producer, consumer = queue[place]
            made = row.start + bisect_left(row_starts, starts[producer])
            latest = min(latest, made, max(consumer - lookahead, row.start))
            receive = _receive(graph, producer, consumer)
            posts[latest].append((starts[producer], channel, place, receive))
    return [[post[3] for post in sorted(before, key=lambda post: post[:3])] for before in posts]


def _send(graph: ActionGraph, producer: int, consumer: int) -> Action:
    made, used = graph.actions[producer], graph.actions[consumer]
    kind = Kind.SEND_F if made.kind is Kind.FORWARD else Kind.SEND_B
    return Action(kind, made.stage, made.microbatch, used.stage)


def _receive(graph: ActionGraph, producer: int, consumer: int) -> Action:
    made, used = graph.actions[producer], graph.actions[consumer]
    kind = Kind.RECV_F if made.kind is Kind.FORWARD else Kind.RECV_B
    return Action(kind, used.stage, used.microbatch, made.stage)
