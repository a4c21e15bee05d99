"""Builds a family's schedule for any placement of stages on ranks, with its messages, and proves it complete.

A ``SEND`` is enqueued right after the action that makes its tensor. A ``RECV`` is posted, without waiting,
some actions before the one that uses it, which then waits. All messages from one rank to another, of either
kind, form one queue, its *channel*: receives are posted in the order of the sends, which NCCL needs::

    1f1b, 2 ranks, 3 microbatches, lookahead 2; each receive is posted before its send

    rank 0 | 0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0RECV_B2 0F2 0SEND_F2 0B1 0B2
    rank 1 | 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2

A receive is never posted later than its message is made: in the replay of the compute actions, it comes
before any action that starts no earlier than the one that makes the message. So the rows can be run, one
action at a time in the order of that replay, with every receive posted before its send; even sends that block
until their receive is posted cannot deadlock (tests/unit/schedule/test_lower.py runs them in random orders).

The two directions between two ranks are separate channels. On NCCL each needs a communicator of its own: in a
shared stream, an early receive would hold up the send behind it.

`validate` proves that each stage runs each microbatch once, on its own rank and in order, that copies to the
host's memory are back before they are needed, that no rank waits for ever, and that the transfers are those
that the edges ask for.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from shardwright.errors import ScheduleError
from shardwright.schedule.action_graph import ActionGraph, check_owner, compile_actions
from shardwright.schedule.actions import TRANSFERS, Action, Edge, Kind, StageCost, check_edges, unit_costs
from shardwright.schedule.families import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from shardwright.schedule.list_scheduler import forward_only as forward_only_rows
from shardwright.schedule.placement import check_kind, check_request
from shardwright.schedule.replay import action_seconds, replay
from shardwright.schedule.schedule import Schedule

_LOOKAHEAD = 2


def lower(schedule: Schedule, edges: Sequence[Edge] | None = None) -> Schedule:
    """Adds the transfers that the edges ask for, receives two compute actions before their use.

    Args:
        schedule: compute actions, and copies to the host, which stay behind what they stand behind.
        edges: which stages feed which; None where each feeds the next. Edges within a rank make no transfer.
            Several messages of one action go in the order of their peer stages.

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
    edges = check_edges(edges, num_stages=schedule.num_stages)
    graph = compile_actions(
        schedule.actions,
        stage_ranks=schedule.stage_ranks,
        num_microbatches=schedule.num_microbatches,
        edges=edges,
    )
    starts = replay(graph, action_seconds(graph, unit_costs(schedule.num_stages))).starts
    receives = _place_receives(graph, starts)
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


def _place_receives(graph: ActionGraph, starts: Sequence[float]) -> list[list[Action]]:
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
            latest = min(latest, made, max(consumer - _LOOKAHEAD, row.start))
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


def validate(schedule: Schedule, edges: Sequence[Edge] | None = None) -> None:
    """Checks a schedule, whoever made it; its transfers, where it has any, are to be those of `lower`.

    Args:
        schedule: with transfers or without.
        edges: which stages feed which; None where each feeds the next.

    Raises:
        ScheduleError: the first action that is missing, doubled, misplaced or never reached, and why.

    >>> from shardwright.schedule import build_schedule
    >>> validate(build_schedule("zb_v", stage_ranks=(0, 1, 1, 0), num_microbatches=4))
    """
    rows = []
    for rank, row in enumerate(schedule.actions):
        for action in row:
            check_owner(action, rank, schedule.stage_ranks, schedule.num_microbatches)
            if (action.peer is None) == (action.kind in TRANSFERS):
                raise ScheduleError(
                    f"rank {rank}: {action} names peer stage {action.peer}. A transfer has one, else none."
                )
        rows.append(tuple(action for action in row if action.kind not in TRANSFERS))
    lowered = lower(replace(schedule, actions=tuple(rows)), edges)
    if not schedule.has_transfers:
        return
    for rank, pair in enumerate(zip(schedule.actions, lowered.actions, strict=True)):
        for here, wanted in zip_longest(*pair):
            if here != wanted:
                raise ScheduleError(
                    f"rank {rank}: {_named(here)} stands where the edges need {_named(wanted)}. Lower the "
                    "compute actions anew, with these edges."
                )


def _named(action: Action | None) -> str:
    if action is None:
        return "nothing"
    return str(action) if action.peer is None else f"{action} with stage {action.peer}"


_FAMILIES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
}


def splits_backward(kind: str) -> bool:
    """Whether a family computes the gradients of inputs (``I``) and of weights (``W``) apart.

    >>> splits_backward("zb_v"), splits_backward("1f1b")
    (True, False)
    """
    check_kind(kind)
    return kind in ("zb_h1", "zb_v")


def build_schedule(
    kind: str,
    *,
    stage_ranks: Sequence[int],
    num_microbatches: int,
    active_microbatches: int | None = None,
    forward_only: bool = False,
    costs: Sequence[StageCost] | None = None,
) -> Schedule:
    """Orders the work of a batch.

    A microbatch passes the stages in order: the forward of a stage needs that of the stage before, its
    backward needs its own forward and the (input) backward of the stage after. The result never deadlocks,
    whatever the placement. On every stage, forwards, backwards and weight gradients each run in the order of
    the microbatches, so that all families add gradients up in the same order. On one rank all families take
    the microbatches one by one.

    Args:
        kind: one of `KINDS`.
        stage_ranks: pipeline rank of each stage; any map, for example that of `place_stages`.
        num_microbatches: parts into which the batch is split.
        active_microbatches: the most that a rank has begun and not wholly done; None for the family's bound.
        forward_only: leave the backward out.
        costs: seconds of each stage, by which the families that are played out choose their order; None for
            forward, ``I`` and ``W`` of one unit each.

    Returns:
        The schedule without transfers, which `lower` adds.

    Raises:
        ScheduleError: the kind is unknown, or a number, the placement or the costs cannot be used.

    >>> print(build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=2))
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F0 1B0 1F1 1B1
    """
    check_kind(kind)
    request = check_request(
        kind,
        stage_ranks=stage_ranks,
        num_microbatches=num_microbatches,
        active_microbatches=active_microbatches,
        costs=costs,
    )
    # One rank waits for nobody: another order would only keep more, and this is how a plain loop goes.
    family = one_f_one_b if request.num_ranks == 1 else _FAMILIES[kind]
    rows = (forward_only_rows if forward_only else family)(request)
    return Schedule(
        kind=kind,
        stage_ranks=request.stage_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(map(tuple, rows)),
    )
