"""The parts of a step add up to it, and each shows what it is named for."""

import pytest
from hypothesis import given, settings
from planned import planned, plans

from shardwright.errors import PlanError
from shardwright.plan import Plan
from shardwright.planner.waterfall import Waterfall, break_down


def by_name(found: Waterfall) -> dict[str, float]:
    return {part.name: part.seconds for part in found.parts}


@settings(max_examples=60)
@given(plan=plans)
def test_the_parts_add_up_to_the_predicted_step(plan: Plan) -> None:
    assert plan.prediction is not None
    found = break_down(plan)
    assert found.step_s == plan.prediction.step_s
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_s, rel=1e-9)
    assert all(part.seconds > 0 for part in found.parts)
    assert found.seconds("remainder") == 0.0


def test_an_edited_prediction_leaves_a_remainder_that_says_so() -> None:
    plan = planned()
    assert plan.prediction is not None
    edited = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"step_s": 0.5})})
    found = break_down(edited)
    assert sum(part.seconds for part in found.parts) == pytest.approx(0.5, rel=1e-9)
    assert (found.parts[-1].name, found.parts[-1].kind) == ("not explained", "remainder")
    assert found.parts[-1].seconds == pytest.approx(0.5 - plan.prediction.step_s)


def test_every_part_by_hand() -> None:
    # 1f1b, 2 ranks, 4 microbatches. Rank 1 works 0.2 + 0.4 + 0.1 a microbatch, rank 0 0.1 + 0.2 + 0.1.
    found = by_name(break_down(planned(slow_stage=2.0, recompute_s=0.1, action_overhead_s=0.0, tie_s=0.01)))
    assert found["forward"] == pytest.approx(4 * 0.15)
    assert found["backward"] == pytest.approx(4 * 0.3)
    assert found["recomputation"] == pytest.approx(4 * 0.1)
    assert found["imbalance"] == pytest.approx(4 * 0.7 - 4 * 0.55)
    # Rank 1 waits for the first forward, and the last backward of rank 0 follows its own.
    assert found["bubble"] == pytest.approx(0.1 + 0.3)
    # One message before the first forward of rank 1, one after its last backward, 1 ms and 1000 B at 1 MB/s.
    assert found["messages: latency"] == pytest.approx(2e-3)
    assert found["messages: bytes"] == pytest.approx(2e-3)
    assert found["sums of tied gradients"] == 0.01
    assert found["sums over replicas"] == pytest.approx(0.04)
    assert found["before and after the schedule"] == 4e-3


def test_cores_copying_and_crowding_show_where_they_cost() -> None:
    assert "shared cores" not in by_name(break_down(planned(cores=2)))
    assert by_name(break_down(planned(cores=1)))["shared cores"] > 0.1
    crowded = break_down(planned(crowding=1.5))
    assert by_name(crowded)["crowded hosts"] > 0.1
    assert crowded.step_s > break_down(planned()).step_s


def test_a_plan_without_a_prediction_is_refused() -> None:
    plan = planned().model_copy(update={"prediction": None})
    with pytest.raises(PlanError, match=r"no prediction.*shardwright plan"):
        break_down(plan)
