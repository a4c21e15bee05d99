"""Proves a schedule complete and in order, or names the first action that is not.

It proves the following for a schedule with transfers (a schedule without gets those of `lower`):

1. Each stage runs each microbatch once, on its own rank: ``F``, and where there is a backward, ``B``, or
   ``I`` and ``W``.
2. On each rank, ``F`` comes before ``B`` or ``I``, ``I`` before ``W``, and stages that feed one another stand
   in order.
3. Every message that the edges ask for is sent once, after the action that makes it, and received once,
   before the action that uses it.
   What is copied to the host's memory is so after its ``F``, and is back before its ``B`` or ``I``.
4. On each channel, a directed pair of ranks, receives are posted in the order of the sends.

That rows reach their end shows in `simulate`, which refuses a deadlock.
"""

from collections.abc import Iterator, Sequence

from shardwright.errors import ScheduleError
from shardwright.schedule.action_graph import check_owner, compile_actions
from shardwright.schedule.actions import TRANSFERS, Action, Edge, Kind, check_edges
from shardwright.schedule.lower import lower
from shardwright.schedule.schedule import Schedule

MessageKey = tuple[Kind, int, int, int]
"""Kind of its send, sending stage, receiving stage, microbatch."""

_SENDS = (Kind.SEND_F, Kind.SEND_B)


def validate(schedule: Schedule, edges: Sequence[Edge] | None = None) -> None:
    """Checks a schedule, whoever made it.

    Args:
        schedule: with transfers or without; in the second case `lower` adds them for the check.
        edges: which stages feed which; None where each feeds the next.

    Raises:
        ScheduleError: the first action that is missing, doubled, misplaced or never reached, and why.

    >>> from shardwright.schedule import build_schedule
    >>> validate(build_schedule("zb_v", stage_ranks=(0, 1, 1, 0), num_microbatches=4))
    """
    num_stages = schedule.num_stages
    edges = check_edges(edges, num_stages=num_stages)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            check_owner(action, rank, schedule.stage_ranks, schedule.num_microbatches)
            if (action.peer is None) == (action.kind in TRANSFERS) or (
                action.peer or 0
            ) >= schedule.num_stages:
                raise ScheduleError(
                    f"rank {rank}: {action} names peer stage {action.peer}. "
                    f"A transfer has one of {num_stages} stages, all else none."
                )
    compile_actions(
        [[action for action in row if action.kind not in TRANSFERS] for row in schedule.actions],
        stage_ranks=schedule.stage_ranks,
        num_microbatches=schedule.num_microbatches,
        edges=edges,
    )
    if not schedule.has_transfers:
        schedule = lower(schedule, edges)
    _check_transfers(schedule, list(_expected_messages(schedule, edges)))
    _check_channels(schedule)


def _expected_messages(schedule: Schedule, edges: Sequence[Edge]) -> Iterator[MessageKey]:
    """The messages that the edges ask for: kind of the send, sending stage, receiving stage, microbatch."""
    for edge in edges:
        if schedule.stage_ranks[edge.source] == schedule.stage_ranks[edge.target]:
            continue
        for k in range(schedule.num_microbatches):
            yield (Kind.SEND_F, edge.source, edge.target, k)
            if edge.has_gradient and schedule.has_backward:
                yield (Kind.SEND_B, edge.target, edge.source, k)


def _message_key(action: Action) -> MessageKey:
    """The message that a send or a receive belongs to."""
    peer = -1 if action.peer is None else action.peer
    if action.kind is Kind.RECV_F:
        return (Kind.SEND_F, peer, action.stage, action.microbatch)
    if action.kind is Kind.RECV_B:
        return (Kind.SEND_B, peer, action.stage, action.microbatch)
    return (action.kind, action.stage, peer, action.microbatch)


def _check_transfers(schedule: Schedule, messages: Sequence[MessageKey]) -> None:
    """Each message is sent once, after it is made, and received once, before it is used."""
    places = {(a.kind, a.stage, a.microbatch): at for row in schedule.actions for at, a in enumerate(row)}
    expected = set(messages)
    found: dict[tuple[bool, MessageKey], tuple[int, Action]] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            if action.kind not in TRANSFERS:
                continue
            key = _message_key(action)
            if key not in expected:
                raise ScheduleError(
                    f"rank {rank}: {action} with stage {action.peer}: no edge between two ranks leads there. "
                    "Remove it, or give the edges with which the schedule was lowered."
                )
            if (action.kind in _SENDS, key) in found:
                raise ScheduleError(
                    f"rank {rank}: {action} with stage {action.peer} is there twice. Remove one of the two."
                )
            found[action.kind in _SENDS, key] = (place, action)
    for key in messages:
        kind, sender, receiver, k = key
        for is_send, stage in ((True, sender), (False, receiver)):
            rank = schedule.stage_ranks[stage]
            if (is_send, key) not in found:
                received = Kind.RECV_F if kind is Kind.SEND_F else Kind.RECV_B
                missing = Action(kind, sender, k) if is_send else Action(received, receiver, k)
                raise ScheduleError(
                    f"{missing} with stage {receiver if is_send else sender} is missing. "
                    f"Add it to the row of rank {rank}, or lower the compute actions anew."
                )
            place, action = found[is_send, key]
            is_whole = (Kind.BACKWARD, stage, k) in places
            backward = Kind.BACKWARD if is_whole else Kind.BACKWARD_INPUT
            compute = Kind.FORWARD if kind is Kind.SEND_F else backward
            if (place < places[compute, stage, k]) == is_send:
                relation = "before it is made" if is_send else "after it is needed"
                raise ScheduleError(
                    f"rank {rank}: {action} with stage {action.peer} comes {relation} by "
                    f"{Action(compute, stage, k)}. Put it {'later' if is_send else 'earlier'} in its row."
                )


def _check_channels(schedule: Schedule) -> None:
    """On every channel, receives are posted in the order of the sends."""
    sends: dict[tuple[int, int], list[Action]] = {}
    receives: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.peer is None:
                continue
            peer = schedule.stage_ranks[action.peer]
            if action.kind in _SENDS:
                sends.setdefault((rank, peer), []).append(action)
            else:
                receives.setdefault((peer, rank), []).append(action)
    for (sender, receiver), queue in sends.items():
        for place, (send, receive) in enumerate(zip(queue, receives[sender, receiver], strict=True)):
            if _message_key(send) != _message_key(receive):
                raise ScheduleError(
                    f"transfer {place} from rank {sender} to rank {receiver} is sent as {send} (to stage "
                    f"{send.peer}) but received as {receive} (from stage {receive.peer}). "
                    "Post the receives in the order of the sends."
                )
