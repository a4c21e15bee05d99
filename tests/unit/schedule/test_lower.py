"""Lowering: which messages, in which order, how early the receives are posted."""

import random

import pytest

from shardwright.errors import ScheduleError
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


def test_rows_of_1f1b_with_transfers():
    schedule = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=3)
    assert text_of(lower(schedule)) == [
        "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0RECV_B2 0F2 0SEND_F2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_gradients_leave_after_the_input_half():
    schedule = build_schedule("zb_h1", stage_ranks=(0, 1), num_microbatches=2)
    row = text_of(lower(schedule))[1]
    assert row.endswith("1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1")


def test_stages_of_one_rank_exchange_no_messages():
    schedule = build_schedule("1f1b", stage_ranks=(0, 0, 1), num_microbatches=1)
    assert text_of(lower(schedule)) == [
        "1RECV_B0 0F0 1F0 1SEND_F0 1B0 0B0",
        "2RECV_F0 2F0 2B0 2SEND_B0",
    ]
    single = build_schedule("zb_v", stage_ranks=(0, 0), num_microbatches=2)
    assert lower(single) == single


def test_no_gradient_returns_where_there_is_none():
    schedule = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=1)
    lowered = lower(schedule, [Edge(0, 1, has_gradient=False)])
    assert text_of(lowered) == ["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"]


def test_stages_that_no_edge_joins_do_not_talk():
    schedule = build_schedule("1f1b", stage_ranks=(0, 1, 2), num_microbatches=2)
    lowered = lower(schedule, [Edge(0, 2), Edge(1, 2)])
    assert Kind.RECV_F not in [action.kind for action in lowered.actions[1]]
    assert all(action.peer == 2 for row in lowered.actions[:2] for action in row if not action.is_compute)


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
        for lookahead in (0, 1, 2, 5):
            lowered = lower(schedule, edges, lookahead=lookahead)
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
            check_lookahead(lowered, lookahead)
            check_sends_follow_their_action(lowered)


def check_lookahead(lowered: Schedule, lookahead: int) -> None:
    """At least `lookahead` compute actions stand between a receive and its use, or it comes first of all."""
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
                assert before <= max(use - lookahead, 0)


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
        assert run_in_random_order(lower(schedule, edges, lookahead=0), seed)
        assert run_in_random_order(lower(schedule, edges), seed)


def test_the_reference_run_can_fail():
    crossed = schedule_of("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    assert run_in_random_order(crossed, 0)
    late = schedule_of("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1")
    assert not run_in_random_order(late, 0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0F0 0B0", "1B0 1F0"), "1B0 needs 1F0, which comes after it"),
        (("0F0 0B0", "1F0"), "1B0 is missing. Add it to the row of rank 1"),
        (("0F0 0B0", "1B0"), "1F0 is missing"),
        (("0B0 0F0 1F0 1B0",), "0B0 needs 0F0, which comes after it"),
        (("0F0 0F0 0B0",), "rank 0 runs 0F0 twice"),
        (("0F0 1B0 1F0 0B0",), "1B0 needs 1F0, which comes after it"),
        (("1F0 0F0 1B0 0B0",), "1F0 needs 0F0, which comes after it"),
        (("0F0 1F0 0B0 1B0",), "0B0 needs 1B0, which comes after it"),
        (("0F0 0W0 0I0",), "0W0 needs 0I0, which comes after it"),
        (("0F0 0B0", "1F1 1B1 1F0 1B0"), "0F1 is missing"),
        (("0F0 0I0",), "0W0 is missing"),
        (("0F0 0W0",), "0I0 is missing"),
        (("0F0 0B0 0W0",), "0B0 and its half 0W0 are both there"),
        (
            ("0F0 2F0 0F1 2F1 2B0 2B1 0B0 0B1", "1F1 1F0 1B0 1B1"),
            "deadlocks: 2F0 on rank 0 waits for ever. Where the ranks stand: rank 0 at 2F0, rank 1 at 1F1",
        ),
    ],
)
def test_compute_that_cannot_run_is_refused(rows, words):
    schedule = schedule_of(*rows)
    with pytest.raises(ScheduleError, match=words):
        lower(schedule)
