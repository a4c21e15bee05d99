"""Lowering: which messages, in which order, how early the receives are posted."""

import random

import pytest

from shardwright.schedule import (
    KINDS,
    Action,
    Edge,
    Kind,
    Schedule,
    build_schedule,
    chain_edges,
    lower,
    place_stages,
)

from .cases import ODD_PLACEMENTS, all_edges, schedule_of, text_of

SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def message(action: Action) -> tuple[str, int, int, int]:
    """The same for both ends: F or B, sending stage, receiving stage, microbatch."""
    ends = (action.stage, action.peer) if action.kind in SENDS else (action.peer, action.stage)
    return (action.kind.value[-1], *ends, action.microbatch)


def channels(schedule: Schedule, kinds: tuple[Kind, ...]) -> dict[tuple[int, int], list]:
    """The messages of each channel in the order of the rows of one end."""
    found: dict[tuple[int, int], list] = {}
    for row in schedule.actions:
        for action in row:
            if action.kind in kinds:
                _, sender, receiver, _ = message(action)
                pair = (schedule.stage_ranks[sender], schedule.stage_ranks[receiver])
                found.setdefault(pair, []).append(message(action))
    return found


def compute_of(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row if action.is_compute] for row in schedule.actions]


def run_in_random_order(schedule: Schedule, seed: int) -> bool:
    """Runs the rows with blocking sends, always letting a random rank go next; true if they end."""
    chance = random.Random(seed)
    position = [0] * schedule.num_ranks
    posted: set = set()
    delivered: set = set()

    def can_go(rank: int) -> bool:
        action = schedule.actions[rank][position[rank]]
        if action.kind in SENDS:
            return message(action) in posted
        if action.kind in RECEIVES or action.kind is Kind.BACKWARD_WEIGHT:
            return True
        wanted = Kind.RECV_F if action.kind is Kind.FORWARD else Kind.RECV_B
        return all(
            message(other) in delivered
            for other in schedule.actions[rank]
            if (other.kind, other.stage, other.microbatch) == (wanted, action.stage, action.microbatch)
        )

    while True:
        ready = [
            rank for rank, row in enumerate(schedule.actions) if position[rank] < len(row) and can_go(rank)
        ]
        if not ready:
            return all(place == len(row) for place, row in zip(position, schedule.actions, strict=True))
        rank = chance.choice(ready)
        action = schedule.actions[rank][position[rank]]
        if action.kind in RECEIVES:
            posted.add(message(action))
        elif action.kind in SENDS:
            delivered.add(message(action))
        position[rank] += 1


def test_no_gradient_returns_where_there_is_none():
    schedule = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=1)
    lowered = lower(schedule, [Edge(0, 1, has_gradient=False)])
    assert text_of(lowered) == ["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"]


CASES = [
    (kind, placement)
    for kind in KINDS
    for placement in (*ODD_PLACEMENTS, place_stages(kind, num_ranks=3), place_stages(kind, num_ranks=4))
]


@pytest.mark.parametrize(("kind", "stage_ranks"), CASES)
def test_properties_of_every_lowering(kind, stage_ranks):
    m = 5
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=m)
    for edges in (chain_edges(len(stage_ranks)), all_edges(len(stage_ranks))):
        lowered = lower(schedule, edges)
        # Nothing but transfers was added, and compute kept its order.
        assert compute_of(lowered) == compute_of(schedule)
        # Both ends of each channel agree about its order.
        assert channels(lowered, SENDS) == channels(lowered, RECEIVES)
        # Every edge between two ranks carries every microbatch, once.
        found = sorted(m for queue in channels(lowered, SENDS).values() for m in queue)
        far = [e for e in edges if stage_ranks[e.source] != stage_ranks[e.target]]
        forward = [("F", e.source, e.target, k) for e in far for k in range(m)]
        backward = [("B", e.target, e.source, k) for e in far for k in range(m) if e.has_gradient]
        assert found == sorted(forward + backward)
        check_lookahead(lowered)
        check_sends_follow_their_action(lowered)


def check_lookahead(lowered: Schedule) -> None:
    """At least two compute actions stand between a receive and its use, or it comes first of all."""
    for row in lowered.actions:
        compute = [action for action in row if action.is_compute]
        before = 0
        for action in row:
            before += action.is_compute
            if action.kind in RECEIVES:
                kinds = (
                    (Kind.FORWARD,) if action.kind is Kind.RECV_F else (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                )
                use = next(
                    place
                    for place, other in enumerate(compute)
                    if other.kind in kinds
                    and (other.stage, other.microbatch) == (action.stage, action.microbatch)
                )
                assert before <= max(use - 2, 0)


def check_sends_follow_their_action(lowered: Schedule) -> None:
    for row in lowered.actions:
        latest = None
        for action in row:
            if action.is_compute:
                latest = action
            elif action.kind in SENDS:
                kinds = (
                    (Kind.FORWARD,) if action.kind is Kind.SEND_F else (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                )
                assert latest is not None
                assert latest.kind in kinds
                assert (latest.stage, latest.microbatch) == (action.stage, action.microbatch)


@pytest.mark.parametrize(("kind", "stage_ranks"), CASES)
def test_rows_end_with_blocking_sends_whoever_is_faster(kind, stage_ranks):
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=5)
    for seed, edges in enumerate((chain_edges(len(stage_ranks)), all_edges(len(stage_ranks)))):
        assert run_in_random_order(lower(schedule, edges), seed)


def test_the_reference_run_can_fail():
    crossed = schedule_of("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    assert run_in_random_order(crossed, 0)
    late = schedule_of("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1")
    assert not run_in_random_order(late, 0)
