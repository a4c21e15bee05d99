"""Cuts on the boundaries of blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.cuts import nesting_of, on_boundaries

LABELS = (
    "embed",
    *(f"layers.{block}.{part}" for block in range(3) for part in ("attention", "mlp.0", "mlp.1")),
    "head",
)


def test_a_cut_counts_the_blocks_that_it_runs_through():
    assert [nesting_of(LABELS, cut) for cut in range(1, len(LABELS))] == [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]
    assert nesting_of(("stages.0.blocks.1.norm", "stages.0.blocks.1.mlp"), 1) == 2
    assert nesting_of(("stages.0.blocks.1", "stages.0.blocks.2"), 1) == 1
    assert nesting_of(("layers.0.norm", "layers.0.norm#1"), 1) == 1


@pytest.mark.parametrize(
    ("cuts", "moved"),
    [
        ((0, 5, 11), (0, 4, 11)),
        ((0, 6, 11), (0, 7, 11)),
        ((0, 4, 11), None),
        ((0, 2, 3, 11), (0, 1, 4, 11)),
        ((0, 5, 6, 11), (0, 4, 7, 11)),
    ],
)
def test_cuts_move_to_the_nearest_boundary(cuts, moved):
    assert on_boundaries(cuts, LABELS, [1.0] * 11, range(12)) == moved


def test_a_boundary_at_which_nothing_may_be_cut_is_none():
    allowed = [position for position in range(12) if position != 4]
    assert on_boundaries((0, 5, 11), LABELS, [1.0] * 11, allowed) == (0, 7, 11)


@given(
    st.sets(st.integers(1, 10), min_size=1, max_size=6), st.lists(st.floats(0, 9), min_size=11, max_size=11)
)
def test_moved_cuts_still_leave_every_stage_something(inner, seconds):
    cuts = (0, *sorted(inner), 11)
    moved = on_boundaries(cuts, LABELS, seconds, range(12))
    if moved is not None:
        assert len(moved) == len(cuts)
        assert list(moved) == sorted(set(moved))
        before, after = (sum(nesting_of(LABELS, cut) for cut in each[1:-1]) for each in (cuts, moved))
        assert after <= before
