"""What earlier runs say about predictions."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.mesh import Mesh
from shardwright.planner import NO_CORRECTION, PastRun, RunKind, correction_of

PIPELINE = RunKind.of(Mesh.of(world_size=2, pipeline=2), ranks_per_node=2)
REPLICAS = RunKind.of(Mesh.of(world_size=2, data=2), ranks_per_node=2)


def past(ratio, *, run="", kind=PIPELINE, predicted_s=0.1, samples=8, outside_s=0.0):
    return PastRun(
        run=run or f"run {ratio}",
        kind=kind,
        model="f",
        samples=samples,
        predicted_s=predicted_s,
        measured_s=predicted_s * ratio + outside_s,
        outside_s=outside_s,
        steps=6,
        predicted_bytes=1,
        measured_bytes=2,
        when="2026-11-23 12:00 UTC",
    )


def test_few_runs_say_nothing():
    assert (
        correction_of([past(1.5, run="a"), past(1.5, run="b")], PIPELINE, model="f", samples=8)
        == NO_CORRECTION
    )


def test_the_more_runs_agree_the_more_they_count():
    of = {
        n: correction_of([past(1.2, run=str(i)) for i in range(n)], PIPELINE, model="f", samples=8).factor
        for n in (3, 10, 20)
    }
    assert 1.0 < of[3] < of[10] < of[20] < 1.2
    assert of[3] == pytest.approx(1.2 ** (3 / 5))


def test_runs_of_another_kind_do_not_count():
    runs = [past(2.0, run=str(i), kind=REPLICAS) for i in range(9)]
    assert correction_of(runs, PIPELINE, model="f", samples=8) == NO_CORRECTION
    assert correction_of(runs, REPLICAS, model="f", samples=8).runs == 9


def test_runs_of_another_model_do_not_count():
    runs = [past(2.0, run=str(i)) for i in range(9)]
    assert correction_of(runs, PIPELINE, model="g", samples=8) == NO_CORRECTION


def test_of_one_run_the_later_entry_counts():
    runs = [past(9.0, run="a"), past(1.0, run="a"), past(1.0, run="b"), past(1.0, run="c")]
    found = correction_of(runs, PIPELINE, model="f", samples=8)
    assert found.runs == 3
    assert found.factor == pytest.approx(1.0)


def test_runs_with_another_batch_do_not_count():
    runs = [past(2.0, run=str(i), samples=4) for i in range(9)]
    assert correction_of(runs, PIPELINE, model="f", samples=8) == NO_CORRECTION
    assert correction_of(runs, PIPELINE, model="f", samples=4).runs == 9


@pytest.mark.parametrize("ratios", [[0.9] + [1.0] * 8 + [3.0], [1.0] * 6 + [3.0] * 4, [1.0] * 3 + [2.0] * 2])
def test_the_interval_holds_nine_of_ten_runs(ratios):
    found = correction_of(
        [past(ratio, run=str(i)) for i, ratio in enumerate(ratios)], PIPELINE, model="f", samples=8
    )
    inside = [ratio for ratio in ratios if abs(ratio / found.factor - 1) <= found.error * (1 + 1e-9)]
    assert len(inside) >= 0.9 * len(ratios)
    assert found.error_of("measured") == found.error
    assert NO_CORRECTION.error_of("measured") < NO_CORRECTION.error_of("estimated")


def test_what_the_last_run_did_outside_of_the_model_is_added_and_no_part_of_the_ratio():
    """Bug: a teacher in the step function was measured in each run, and missing in each prediction."""
    runs = [past(1.2, run=str(i), outside_s=outside_s) for i, outside_s in enumerate((0.0, 0.3, 0.12))]
    first = correction_of(runs[:2], PIPELINE, model="f", samples=8)
    assert (first.factor, first.outside_s, first.runs) == (1.0, 0.3, 0)
    found = correction_of(runs, PIPELINE, model="f", samples=8)
    assert found.outside_s == 0.12
    assert found.factor == pytest.approx(1.2 ** (3 / 5))


def test_a_mask_that_takes_a_moment_is_not_told():
    assert correction_of([past(1.0, outside_s=1e-3)], PIPELINE, model="f", samples=8) == NO_CORRECTION


@given(st.lists(st.floats(0.2, 5.0), min_size=3, max_size=40))
def test_corrections_lie_between_none_and_the_runs(ratios):
    found = correction_of(
        [past(ratio, run=str(i)) for i, ratio in enumerate(ratios)], PIPELINE, model="f", samples=8
    )
    assert min(1.0, *ratios[-20:]) - 1e-9 <= found.factor <= max(1.0, *ratios[-20:]) + 1e-9
    assert found.runs == min(20, len(ratios))


def test_a_run_survives_json():
    run = past(1.1)
    assert PastRun.from_dict(json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.parametrize(
    ("key", "value"),
    [("predicted_s", 0), ("measured_s", math.nan), ("outside_s", 9.0), ("kind", 3), ("steps2", 1)],
)
def test_what_is_no_run_is_refused(key, value):
    with pytest.raises(ValueError, match="no past run"):
        PastRun.from_dict({**past(1.1).to_dict(), key: value})
