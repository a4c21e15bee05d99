"""The validator refuses what is broken, says where, and lets the rest pass."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    KINDS,
    Action,
    Kind,
    Schedule,
    build_schedule,
    chain_edges,
    lower,
    validate,
)

from .cases import ODD_PLACEMENTS, all_edges, schedule_of

LOWERED = ("0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        # 1. Each stage runs each microbatch once.
        (("0F0 0B0", "1F0"), "1B0 is missing. Add it to the row of rank 1, which runs stage 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0"), "1F1 is missing"),
        (("0F0 0I0",), "0W0 is missing"),
        (("0F0 0W0",), "0I0 is missing"),
        (("0F0 0F1 0B0",), "0B1 is missing"),
        (("0F0 0F0 0B0",), "rank 0 runs 0F0 twice"),
        (("0F0 0B0 0B0",), "rank 0 runs 0B0 twice"),
        (("0F0 0B0 0W0",), "0B0 and its half 0W0 are both there"),
        (("0F0 0I0 0W0 0B0",), "rank 0 runs 0B0 twice"),
        # 2. In order.
        (("0B0 0F0",), "0B0 needs 0F0, which comes after it"),
        (("0F0 0W0 0I0",), "0W0 needs 0I0, which"),
        (("0F0 1F0 0B0 1B0",), "0B0 needs 1B0, which"),
        (("1F0 0F0 1B0 0B0",), "1F0 needs 0F0, which"),
        # Compute alone can deadlock across ranks.
        (("0F0 2F0 0F1 2F1 2B0 2B1 0B0 0B1", "1F1 1F0 1B0 1B1"), "2F0 on rank 0 waits for ever"),
        # 3. Each message is sent and received once, in time, in one order at both ends of a channel.
        (
            ("0F0 0RECV_B0 0B0", LOWERED[1]),
            "rank 0: 0F0 stands where the edges need 0RECV_B0 with stage 1. Lower the compute actions anew",
        ),
        (
            (LOWERED[0], "1RECV_F0 1F0 1B0"),
            "nothing stands where the edges need 1SEND_B0 with stage 0",
        ),
        ((LOWERED[0], f"{LOWERED[1]} 1SEND_B0"), "1SEND_B0 with stage 0 stands where the edges need nothing"),
        ((LOWERED[0], "1F0 1RECV_F0 1B0 1SEND_B0"), "1F0 stands where the edges need 1RECV_F0 with stage 0"),
    ],
)
def test_each_way_to_break_a_schedule_is_named(rows, words):
    with pytest.raises(ScheduleError, match=words):
        validate(schedule_of(*rows))


def _rows(*rows: tuple[Action, ...], stage_ranks: tuple[int, ...] = (0, 1)) -> Schedule:
    return Schedule("test", stage_ranks, 1, rows)


F0, B0 = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
F1, B1 = Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 1, 0)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (_rows((F1, B0), (F0, B1)), "rank 0 holds 1F0, but stage 1 is on rank 1. Move the action there"),
        (_rows((F0, B0, Action(Kind.FORWARD, 2, 0)), (F1, B1)), "rank 0 holds 2F0, but there are 2 stages"),
        (_rows((F0, B0, Action(Kind.FORWARD, 0, 1)), (F1, B1)), "but there are 2 stages and 1 microbatches"),
        (_rows((replace(F0, peer=1), B0), (F1, B1)), "0F0 names peer stage 1. A transfer has one"),
        (_rows((F0, Action(Kind.SEND_F, 0, 0), B0), (F1, B1)), "0SEND_F0 names peer stage None"),
        (_rows((F0, F1, Action(Kind.SEND_F, 0, 0, 1), B1, B0), stage_ranks=(0, 0)), "the edges need 1B0"),
    ],
)
def test_actions_that_make_no_sense(schedule, words):
    with pytest.raises(ScheduleError, match=words):
        validate(schedule)


CASES = st.tuples(
    st.sampled_from(KINDS), st.sampled_from([*ODD_PLACEMENTS[2:], (0, 1, 2), (0, 1, 0, 1)]), st.integers(1, 4)
)


def lowered_case(case, *, skips: bool):
    kind, stage_ranks, m = case
    edges = all_edges(len(stage_ranks)) if skips else chain_edges(len(stage_ranks))
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=m)
    return lower(schedule, edges), edges


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return replace(schedule, actions=tuple(rows))


@settings(deadline=None, max_examples=120)
@given(case=CASES, skips=st.booleans(), seed=st.integers(0, 2**32))
def test_any_dropped_action_is_missed(case, skips, seed):
    schedule, edges = lowered_case(case, skips=skips)
    validate(schedule, edges)
    chance = random.Random(seed)
    rank = chance.randrange(schedule.num_ranks)
    row = list(schedule.actions[rank])
    row.pop(chance.randrange(len(row)))
    with pytest.raises(ScheduleError):
        validate(with_row(schedule, rank, row), edges)


@settings(deadline=None, max_examples=200)
@given(case=CASES, skips=st.booleans(), seed=st.integers(0, 2**32))
def test_two_sends_of_a_channel_in_the_wrong_order_are_noticed(case, skips, seed):
    schedule, edges = lowered_case(case, skips=skips)
    chance = random.Random(seed)
    queues: dict[tuple[int, int], list[int]] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                queues.setdefault((rank, schedule.stage_ranks[action.peer or 0]), []).append(place)
    long = [(rank, places) for (rank, _), places in sorted(queues.items()) if len(places) > 1]
    if not long:
        return
    rank, places = chance.choice(long)
    i, j = sorted(chance.sample(places, 2))
    row = list(schedule.actions[rank])
    row[i], row[j] = row[j], row[i]
    with pytest.raises(ScheduleError):
        validate(with_row(schedule, rank, row), edges)
