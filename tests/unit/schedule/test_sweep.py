"""Every schedule there is, up to a size: lowered, proved, and within its bounds.

The first test takes a sample of what the others, marked ``sweep``, take whole.
"""

import itertools

import pytest

from shardwright.schedule import (
    KINDS,
    Kind,
    build_schedule,
    lower,
    validate,
)

from .cases import all_edges, all_placements, classic_cases, count_begun, count_kept
from .formulas import peak_activations


def prove(kind, stage_ranks, m, *, lookaheads=(0, 2), **options):
    """Builds, lowers and validates; returns the schedule."""
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=m, **options)
    for lookahead in lookaheads:
        validate(lower(schedule, lookahead=lookahead))
    bound = options.get("active_microbatches")
    if bound is not None and schedule.has_backward:
        assert max(map(count_begun, schedule.actions)) <= bound
    return schedule


def check_memory(schedule, kind, v):
    for rank, row in enumerate(schedule.actions):
        kept = count_kept(row, until=(Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        assert kept <= peak_activations(
            kind,
            num_ranks=schedule.num_ranks,
            rank=rank,
            num_microbatches=schedule.num_microbatches,
            stages_per_rank=v,
        )


def is_classic(kind, v):
    return v == 2 if kind == "zb_v" else v == 1 or kind == "interleaved_1f1b"


def test_a_sample_of_the_sweep():
    sample = itertools.islice(classic_cases(8, 16, 4), 3, None, 13)
    for index, (kind, stage_ranks, m) in enumerate(sample):
        if len(stage_ranks) * m > 160:
            continue
        schedule = prove(kind, stage_ranks, m, lookaheads=(index % 3,))
        v = len(stage_ranks) // schedule.num_ranks
        if is_classic(kind, v):
            check_memory(schedule, kind, v)


@pytest.mark.parametrize("kind", KINDS)
def test_all_placements_of_up_to_four_stages_on_up_to_three_ranks(kind):
    for n in range(1, 5):
        for stage_ranks in all_placements(n, 3):
            schedule = prove(kind, stage_ranks, 4, lookaheads=(0,))
            edges = all_edges(n)
            validate(lower(schedule, edges), edges)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", range(1, 9))
def test_all_classic_schedules(kind, p):
    """All p <= 8, m <= 16, v <= 4."""
    for found, stage_ranks, m in classic_cases(8, 16, 4):
        if found != kind or max(stage_ranks) + 1 != p:
            continue
        schedule = prove(kind, stage_ranks, m)
        v = len(stage_ranks) // p
        if is_classic(kind, v):
            check_memory(schedule, kind, v)
        prove(kind, stage_ranks, m, lookaheads=(2,), forward_only=True)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", range(1, 7))
def test_all_placements(kind, n):
    """Every map of up to six stages to up to three ranks, with every stage feeding every later one."""
    edges = all_edges(n)
    for stage_ranks in all_placements(n, 3):
        for m, active in ((1, None), (3, 1), (4, 2), (5, None)):
            schedule = prove(kind, stage_ranks, m, lookaheads=(0,), active_microbatches=active)
            validate(lower(schedule, edges, lookahead=1), edges)
