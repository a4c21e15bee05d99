"""Any placement, any costs, any bound: the schedule is complete, ends, and keeps to its bounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule import (
    KINDS,
    Kind,
    StageCost,
    build_schedule,
    lower,
    simulate,
    unit_costs,
    validate,
)
from shardwright.schedule.list_scheduler import Policy, Ration, deepest_first, list_schedule, oldest_first
from shardwright.schedule.placement import check_request
from shardwright.schedule.schedule import Schedule

from .cases import ODD_PLACEMENTS, all_edges, all_placements, count_begun, count_kept

PLACEMENTS = st.lists(st.integers(0, 3), min_size=1, max_size=7).map(
    lambda ranks: tuple(sorted(set(ranks)).index(rank) for rank in ranks)
)
SECONDS = st.floats(0.0, 4.0)


@st.composite
def stage_costs(draw, num_stages):
    costs = []
    for _ in range(num_stages):
        weight_s = draw(SECONDS)
        costs.append(StageCost(draw(SECONDS), weight_s + draw(SECONDS), weight_s))
    return costs


@settings(deadline=None, max_examples=150)
@given(data=st.data(), kind=st.sampled_from(KINDS), stage_ranks=PLACEMENTS, m=st.integers(1, 9))
def test_any_placement_costs_and_bound(data, kind, stage_ranks, m):
    active = data.draw(st.none() | st.integers(1, 5))
    costs = data.draw(st.none() | stage_costs(len(stage_ranks)))
    forward_only = data.draw(st.booleans())
    schedule = build_schedule(
        kind,
        stage_ranks=stage_ranks,
        num_microbatches=m,
        active_microbatches=active,
        costs=costs,
        forward_only=forward_only,
    )
    validate(schedule)
    assert schedule.has_backward is not forward_only
    if active is not None and not forward_only:
        assert max(map(count_begun, schedule.actions)) <= active


@pytest.mark.parametrize("kind", KINDS)
def test_all_families_add_gradients_up_in_the_same_order(kind):
    """Otherwise their sums would differ in the last bits."""
    whole = Kind.BACKWARD
    for stage_ranks in [*ODD_PLACEMENTS, (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)]:
        schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=7)
        for kinds in ((Kind.FORWARD,), (whole, Kind.BACKWARD_INPUT), (whole, Kind.BACKWARD_WEIGHT)):
            for stage, rank in enumerate(stage_ranks):
                row = [a for a in schedule.actions[rank] if a.stage == stage and a.kind in kinds]
                assert [action.microbatch for action in row] == list(range(7)), stage_ranks


@pytest.mark.parametrize("stage_ranks", ODD_PLACEMENTS)
def test_odd_placements_are_nearly_as_fast_as_their_busiest_rank(stage_ranks):
    """The busiest rank, after what it must wait for, bounds every order from below."""
    m, costs = 16, unit_costs(len(stage_ranks))
    bound = 0.0
    for rank in range(max(stage_ranks) + 1):
        first = stage_ranks.index(rank)
        bound = max(bound, first * 1.0 + 3.0 * m * stage_ranks.count(rank))
    for kind, slack in (("zb_h1", 1.03), ("zb_v", 1.03), ("1f1b", 1.28), ("interleaved_1f1b", 1.28)):
        schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=m)
        assert bound <= simulate(schedule, costs).step_s <= slack * bound, kind


@settings(deadline=None, max_examples=100)
@given(
    data=st.data(),
    stage_ranks=PLACEMENTS,
    m=st.integers(1, 6),
    splits=st.booleans(),
    orders=st.tuples(*[st.sampled_from([deepest_first, oldest_first, lambda s, k: (s, k)])] * 2),
)
def test_no_ration_deadlocks_however_tight_and_whatever_the_order(data, stage_ranks, m, splits, orders):
    """The promise of list_scheduler.py, for policies that no family uses."""
    least = [stage_ranks.count(rank) for rank in range(max(stage_ranks) + 1)]
    ration = Ration(
        stage=data.draw(st.none() | st.tuples(*[st.integers(1, 3)] * len(stage_ranks))),
        rank=data.draw(st.none() | st.tuples(*[st.integers(n, n + 2) for n in least])),
        microbatches=data.draw(st.none() | st.integers(1, 3)),
    )
    request = check_request(
        "test",
        stage_ranks=stage_ranks,
        num_microbatches=m,
        active_microbatches=None,
        costs=data.draw(stage_costs(len(stage_ranks))),
    )
    policy = Policy(ration=ration, forward_order=orders[0], backward_order=orders[1], splits_backward=splits)
    rows = list_schedule(policy, request)
    validate(Schedule("test", stage_ranks, m, tuple(map(tuple, rows))))
    for rank, row in enumerate(rows):
        kept = count_kept(tuple(row), until=(Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        assert ration.rank is None or kept <= ration.rank[rank]
        assert ration.microbatches is None or count_begun(tuple(row)) <= ration.microbatches


@pytest.mark.parametrize("stage_ranks", ODD_PLACEMENTS)
@pytest.mark.parametrize("active", [None, 1, 2])
def test_forward_only(stage_ranks, active):
    schedules = {
        build_schedule(
            kind, stage_ranks=stage_ranks, num_microbatches=5, active_microbatches=active, forward_only=True
        ).actions
        for kind in KINDS
    }
    assert len(schedules) == 1  # without backwards, families do not differ
    schedule = Schedule("test", stage_ranks, 5, schedules.pop())
    validate(schedule)
    assert {action.kind for row in schedule.actions for action in row} == {Kind.FORWARD}
    for rank, row in enumerate(schedule.actions):
        last = max(stage for stage, owner in enumerate(stage_ranks) if owner == rank)
        begun: set[int] = set()
        for action in row:
            begun.add(action.microbatch)
            assert active is None or len(begun) <= active
            if action.stage == last:
                begun.remove(action.microbatch)


@pytest.mark.parametrize("kind", KINDS)
def test_all_placements_of_up_to_four_stages_on_up_to_three_ranks(kind):
    for n in range(1, 5):
        for stage_ranks in all_placements(n, 3):
            schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=4)
            validate(lower(schedule))
            edges = all_edges(n)
            validate(lower(schedule, edges), edges)
