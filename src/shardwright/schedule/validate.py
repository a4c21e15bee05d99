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
from shardwright.schedule.action_graph import check_host_copies
from shardwright.schedule.actions import COMPUTE, TRANSFERS, Action, Edge, Kind, check_edges
from shardwright.schedule.lower import lower
from shardwright.schedule.schedule import Schedule

__all__ = ["validate"]

MessageKey = tuple[Kind, int, int, int]
"""Kind of its send, sending stage, receiving stage, microbatch."""

_Places = dict[tuple[Kind, int, int], int]
"""(kind, stage, microbatch) -> place in the row of the stage's rank."""

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
    edges = check_edges(edges, num_stages=schedule.num_stages)
    places = _find_compute(schedule)
    _check_complete(schedule, places)
    _check_local_order(schedule, places, edges)
    for rank, row in enumerate(schedule.actions):
        check_host_copies(row, rank)
    if not schedule.has_transfers:
        schedule = lower(schedule, edges)
        places = _find_compute(schedule)
    messages = list(_expected_messages(schedule, edges))
    _check_transfers(schedule, places, messages)
    _check_channels(schedule)


def _find_compute(schedule: Schedule) -> _Places:
    places: _Places = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            _check_owner(schedule, rank, action)
            key = (action.kind, action.stage, action.microbatch)
            if action.kind in COMPUTE and key in places:
                raise ScheduleError(f"rank {rank} runs {action} twice. Remove one of the two.")
            if action.kind in COMPUTE:
                places[key] = place
    return places


def _check_owner(schedule: Schedule, rank: int, action: Action) -> None:
    n, m = schedule.num_stages, schedule.num_microbatches
    if not 0 <= action.stage < n or not 0 <= action.microbatch < m:
        raise ScheduleError(
            f"rank {rank} holds {action}, but there are {n} stages and {m} microbatches, numbered from 0. "
            "Remove it."
        )
    owner = schedule.stage_ranks[action.stage]
    if owner != rank:
        raise ScheduleError(
            f"rank {rank} holds {action}, but stage {action.stage} is on rank {owner}. Move the action there."
        )
    if (action.peer is None) == (action.kind in TRANSFERS) or (action.peer or 0) not in range(n):
        raise ScheduleError(
            f"rank {rank}: {action} names peer stage {action.peer}. "
            f"A transfer has one of {n} stages, all else none."
        )


def _check_complete(schedule: Schedule, places: _Places) -> None:
    has_backward = schedule.has_backward
    for stage, rank in enumerate(schedule.stage_ranks):
        for k in range(schedule.num_microbatches):
            if (Kind.FORWARD, stage, k) not in places:
                _refuse_missing(Action(Kind.FORWARD, stage, k), rank)
            halves = [(kind, stage, k) in places for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
            if (Kind.BACKWARD, stage, k) in places:
                if any(halves):
                    half = Kind.BACKWARD_INPUT if halves[0] else Kind.BACKWARD_WEIGHT
                    raise ScheduleError(
                        f"rank {rank} runs {Action(half, stage, k)} and the whole backward "
                        f"{Action(Kind.BACKWARD, stage, k)} too. Keep B, or I and W."
                    )
            elif any(halves) and not all(halves):
                missing = Kind.BACKWARD_WEIGHT if halves[0] else Kind.BACKWARD_INPUT
                _refuse_missing(Action(missing, stage, k), rank)
            elif has_backward and not any(halves):
                _refuse_missing(Action(Kind.BACKWARD, stage, k), rank)


def _refuse_missing(action: Action, rank: int) -> None:
    raise ScheduleError(
        f"{action} is missing. Add it to the row of rank {rank}, which runs stage {action.stage}."
    )


def _check_local_order(schedule: Schedule, places: _Places, edges: Sequence[Edge]) -> None:
    """Checks the order of a rank's own work in its row."""
    for kind, stage, k in places:
        if kind is Kind.BACKWARD_WEIGHT:
            _check_pair(schedule, places, (Kind.BACKWARD_INPUT, stage, k), (kind, stage, k))
        elif kind is not Kind.FORWARD:
            _check_pair(schedule, places, (Kind.FORWARD, stage, k), (kind, stage, k))
    for edge in edges:
        if schedule.stage_ranks[edge.source] != schedule.stage_ranks[edge.target]:
            continue
        for k in range(schedule.num_microbatches):
            _check_pair(schedule, places, (Kind.FORWARD, edge.source, k), (Kind.FORWARD, edge.target, k))
            if edge.has_gradient and schedule.has_backward:
                first, second = _backward(places, edge.target, k), _backward(places, edge.source, k)
                _check_pair(schedule, places, (first, edge.target, k), (second, edge.source, k))


def _check_pair(
    schedule: Schedule, places: _Places, first: tuple[Kind, int, int], second: tuple[Kind, int, int]
) -> None:
    if places[first] > places[second]:
        raise ScheduleError(
            f"rank {schedule.stage_ranks[second[1]]} runs {Action(*second)} before {Action(*first)}, "
            "which it needs. Put it later in its row."
        )


def _backward(places: _Places, stage: int, microbatch: int) -> Kind:
    """The action that makes and takes gradients."""
    whole = (Kind.BACKWARD, stage, microbatch) in places
    return Kind.BACKWARD if whole else Kind.BACKWARD_INPUT


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


def _check_transfers(schedule: Schedule, places: _Places, messages: Sequence[MessageKey]) -> None:
    """Each message is sent once, after it is made, and received once, before it is used."""
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
            compute = Kind.FORWARD if kind is Kind.SEND_F else _backward(places, stage, k)
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
