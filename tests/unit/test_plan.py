"""The plan file: round trip, and every way to be unusable; how two plans differ."""

import json
from pathlib import Path
from typing import Any

import pytest
from graphs import chain_graph
from observe.plans import two_stage_plan
from planned import usual_conditions

from shardwright.cli.commands.compare import Change, diff_plans
from shardwright.errors import PlanError, StalePlanError
from shardwright.plan import (
    Alternative,
    MemoryPrediction,
    MeshPlan,
    Plan,
    Prediction,
    SchedulePlan,
    StagePlan,
    StagePrediction,
    identity,
)

GRAPH = chain_graph(2)


def make_plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "model": identity(GRAPH),
        "mesh": MeshPlan(pipeline=2, data=2),
        "schedule": SchedulePlan(kind="1f1b", microbatches=4),
        "stages": (
            StagePlan(rank=0, units=("embed", "h.0"), recompute=("h.0",)),
            StagePlan(rank=1, units=("h.1", "head")),
        ),
    }
    return Plan(**{**fields, **changes})


def with_prediction() -> Plan:
    stage = StagePrediction(forward_s=0.1, backward_s=0.2, parameter_bytes=800)
    memory = MemoryPrediction(
        parameters_bytes=800, gradients_bytes=800, optimizer_bytes=1600, activations_bytes=100
    )
    return make_plan(
        prediction=Prediction(
            step_s=1.5,
            bubble=0.2,
            stages=(stage, stage),
            memory=(memory, memory),
            provenance="measured",
            conditions=usual_conditions(2),
        ),
        replicated={"embed.weight": (0, 1)},
        why=("because",),
        alternatives=(
            Alternative(
                schedule="gpipe",
                microbatches=4,
                stages=2,
                step_s=1.6,
                peak_bytes=4000,
                verdict="slower by 7 %",
            ),
        ),
        pins={"microbatches": 4},
    )


def edited(**changes: Any) -> str:
    document = json.loads(make_plan().to_json())
    document.update(changes)
    return json.dumps(document)


def refusal(text: str | bytes) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    return str(caught.value)


def test_round_trip(tmp_path: Path) -> None:
    plan = with_prediction()
    plan.write(tmp_path / "deep" / "plan.json")
    assert Plan.read(tmp_path / "deep" / "plan.json") == plan
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plan.json"]


def test_table() -> None:
    assert with_prediction().table().splitlines() == [
        "stage  rank  units             parameters  forward  backward  sends",
        "0      0     embed .. h.0 (2)  800 B       100 ms   200 ms    0 B",
        "1      1     h.1 .. head (2)   800 B       100 ms   200 ms    0 B",
    ]
    assert make_plan().table().splitlines()[1].split() == ["0", "0", "embed", "..", "h.0", "(2)", *"----"]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_cut_off(fraction: float) -> None:
    text = make_plan().to_json().strip()
    assert "is no JSON" in refusal(text[: int(len(text) * fraction)])


@pytest.mark.parametrize("text", ["", "{", "nonsense"])
def test_not_json(text: str) -> None:
    assert "Mend that line (a comma too many?), or make the plan anew." in refusal(text)


@pytest.mark.parametrize("version", [0, 1, 3, "1", None, True])
def test_other_version(version: Any) -> None:
    with pytest.raises(StalePlanError, match=f"has plan_version {version!r}, but shardwright"):
        Plan.parse(edited(plan_version=version))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"colour": "red"}, "colour is not a field. Remove it."),
        (
            {"schedule": {"kind": "2f2b", "microbatches": 4}},
            "schedule.kind is '2f2b', but it must be one of 'gpipe'",
        ),
        (
            {"schedule": {"kind": "1f1b", "microbatches": 0}},
            "schedule.microbatches is 0, but it must be at least 1",
        ),
        ({"schedule": {"kind": "1f1b"}}, "schedule.microbatches is missing."),
        ({"mesh": {"pipeline": 2, "placement_strategy": "DPP"}}, "mesh.placement_strategy is 'DPP', but"),
        ({"mesh": {"pipeline": 1}}, "stages.1.rank is 1, but mesh.pipeline is 1: ranks run from 0 to 0"),
        ({"stages": []}, "stages is empty"),
        ({"replicated": {"w": [0, 2]}}, "replicated.w names stages [0, 2], but stages run from 0 to 1"),
        (
            {
                "stages": [
                    {"rank": 0, "units": ["embed", "h.0", "h.0"]},
                    {"rank": 1, "units": ["h.1", "head"]},
                ]
            },
            "1 of the model's units are placed more than once (h.0)",
        ),
        (
            {"stages": [{"rank": 0, "units": ["embed", "h.0"]}, {"rank": 1, "units": ["h.1"]}]},
            "1 of the model's units are not in the stages (head)",
        ),
        (
            {"stages": [{"rank": 0, "units": ["embed", "h.0"]}, {"rank": 1, "units": ["h.1", "tail"]}]},
            "1 of the model's units are not in the stages (head) and the stages name 1 that the model",
        ),
        (
            {"stages": [{"rank": 0, "units": ["h.0", "embed"]}, {"rank": 1, "units": ["h.1", "head"]}]},
            "the order differs at position 0: the model calls embed, the stages have h.0",
        ),
        (
            {"stages": [{"rank": 0, "units": ["embed", "h.0", "h.1", "head"], "recompute": ["h.9"]}]},
            "stages.0.recompute names units that the stage does not have: ['h.9']",
        ),
    ],
)
def test_contradictions(changes: dict[str, Any], text: str) -> None:
    assert text in refusal(edited(**changes))


def test_check_accepts_its_own_model() -> None:
    make_plan().check(GRAPH, world_size=4)


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
