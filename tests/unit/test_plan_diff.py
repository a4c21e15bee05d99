"""How two plans differ."""

from observe.plans import two_stage_plan

from shardwright.cli.commands.compare import Change, diff_plans
from shardwright.plan import Plan, StagePlan


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
