"""How two plans differ."""

from observe.plans import two_stage_plan

from shardwright.plan import Plan, StagePlan
from shardwright.plan.diff import Change, diff_plans


def changed(plan: Plan, **changes) -> Plan:
    return Plan.model_validate({**plan.model_dump(), **changes})


def four_units() -> Plan:
    plan = two_stage_plan()
    units = ("embed", "a", "b", "head")
    return changed(
        plan,
        model={**plan.model.model_dump(), "units": units},
        stages=[{"rank": 0, "units": units[:2]}, {"rank": 1, "units": units[2:]}],
    )


def test_equal_plans_decide_alike():
    found = diff_plans(two_stage_plan(), two_stage_plan())
    assert (found.decision, found.prediction) == ((), ())
    assert str(found) == "the plans decide alike"


def test_units_that_moved_are_named_with_both_stages():
    plan = four_units()
    moved = changed(plan, stages=[{"rank": 0, "units": ("embed",)}, {"rank": 1, "units": ("a", "b", "head")}])
    assert diff_plans(plan, moved).decision == (Change("a", "stage 0", "stage 1"),)
    moved = changed(plan, stages=[{"rank": 0, "units": ()}, {"rank": 1, "units": plan.model.units}])
    assert diff_plans(plan, moved).decision == (Change("embed .. a (2)", "stage 0", "stage 1"),)


def test_degrees_schedule_ranks_recomputation_ties_and_pins_are_compared():
    plan = four_units()
    other = changed(
        plan,
        mesh={"pipeline": 2, "data": 1, "placement_strategy": "PDT"},
        schedule={"kind": "gpipe", "microbatches": 6, "active_microbatches": 2},
        stages=[
            StagePlan(rank=1, units=("embed", "a")),
            StagePlan(rank=0, units=("b", "head"), recompute=("b",)),
        ],
        replicated={"embed.weight": (0, 1)},
        pins={"pipeline": "gpipe"},
    )
    assert [(c.what, c.before, c.after) for c in diff_plans(plan, other).decision] == [
        ("mesh.data", "2", "1"),
        ("mesh.placement_strategy", "DPT", "PDT"),
        ("schedule.kind", "1f1b", "gpipe"),
        ("schedule.microbatches", "3", "6"),
        ("schedule.active_microbatches", "unset", "2"),
        ("stage 0", "rank 0", "rank 1"),
        ("stage 1", "rank 1", "rank 0"),
        ("recomputed units", "none", "b"),
        ("replicated.embed.weight", "unset", "0, 1"),
        ("pins.pipeline", "unset", "gpipe"),
    ]


def test_plans_of_other_models_name_what_only_one_has():
    plan, other = two_stage_plan(), four_units()
    other = changed(other, model={**other.model.model_dump(), "fingerprint": "g", "num_parameters": 11})
    found = {change.what: change for change in diff_plans(plan, other).decision}
    assert found["model.fingerprint"] == Change("model.fingerprint", "f", "g")
    assert found["model.num_parameters"] == Change("model.num_parameters", "10", "11")
    assert found["model.units"] == Change("model.units", "none only here", "a, b only here")


def test_predictions_alone_are_shown_and_make_no_difference():
    plan = two_stage_plan()
    assert plan.prediction is not None
    slower = {**plan.prediction.model_dump(), "step_s": 1.5, "bubble": 0.3, "provenance": "estimated"}
    found = diff_plans(plan, changed(plan, prediction=slower, why=("for another reason",)))
    assert found.decision == ()
    assert str(found).splitlines() == [
        "the plans decide alike",
        "predictions",
        "  step            1.20 s -> 1.50 s (+25.0%)",
        "  bubble          25.0% -> 30.0%",
        "  times of units  measured -> estimated",
    ]
    found = diff_plans(plan, changed(plan, prediction=None))
    assert found.prediction == (Change("prediction", "there", "none"),)
