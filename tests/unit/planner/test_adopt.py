"""Plans from files, and their schedules."""

from typing import Any

import pytest
from graphs import chain_graph, profile_of

from planner.machines import machines
from shardwright.config import Config
from shardwright.costs.calibration import ACTION_S
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.planner import make_plan, overruled_settings, schedule_of, stage_costs_of
from shardwright.planner.fabric import Fabric
from shardwright.schedule import build_schedule, simulate

GRAPH = chain_graph(4)


def planned(**config: Any) -> Plan:
    return make_plan(
        {4: (GRAPH, profile_of())},
        cluster=machines(),
        config=Config.parse(config),
        mesh=Mesh.of(world_size=2, pipeline=2),
    )


def overruled(**config: Any) -> list[str]:
    return list(overruled_settings(planned(pipeline="1f1b"), Config.parse(config)))


def test_settings_that_the_plan_keeps() -> None:
    assert overruled() == []
    same = {"microbatches": 4, "partitions": 2, "pipeline": "interleaved", "virtual_stages": 1}
    assert overruled(**same, memory_limit="1GiB", activation_checkpointing="none") == []


def test_all_settings_that_the_plan_does_not_keep_are_listed() -> None:
    *lines, last = overruled(
        microbatches=8,
        partitions=4,
        pipeline="simple",
        active_microbatches=2,
        auto_partition=False,
        default_partition=0,
        activation_checkpointing="full",
        memory_limit=1000,
    )
    assert lines == [
        "pipeline_parallel_degree is 4, but the plan has 2.",
        "microbatches is 8, but the plan has 4.",
        "pipeline is 'gpipe', but the plan has '1f1b'.",
        "active_microbatches is 2, but the plan has None.",
        "auto_partition is False, but the plan says where each unit goes.",
        "activation_checkpointing is 'full', but the plan recomputes 0 of 6 units.",
    ]
    assert last.startswith("memory_limit is 1000 B, but the plan is predicted to need ")


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zb_v"])
def test_the_schedule_survives_the_file(kind: str) -> None:
    plan = planned(pipeline=kind)
    schedule = schedule_of(plan)
    assert schedule == schedule_of(Plan.parse(plan.to_json()))
    assert schedule.kind == kind
    assert schedule.stage_ranks == plan.stage_ranks
    assert not schedule_of(plan, forward_only=True).has_backward


def test_a_plan_by_hand_has_unit_costs() -> None:
    plan = planned(pipeline="zb_h1").model_copy(update={"prediction": None})
    assert stage_costs_of(plan) is None
    assert schedule_of(plan) == build_schedule("zb_h1", stage_ranks=(0, 1), num_microbatches=4)


@pytest.mark.parametrize("kind", ["1f1b", "zb_h1", "zb_v"])
def test_the_schedule_of_the_file_is_the_one_that_was_simulated(kind: str) -> None:
    instant = machines(intra=(0.0, 1e18))
    config = Config.parse({"pipeline": kind, "memory_limit": 9000})
    mesh = Mesh.of(world_size=2, pipeline=2)
    plan = make_plan({4: (GRAPH, profile_of())}, cluster=instant, config=config, mesh=mesh)
    assert any(stage.recompute for stage in plan.stages)
    again = simulate(schedule_of(plan), stage_costs_of(plan) or (), action_overhead_s=ACTION_S)
    assert plan.prediction is not None
    overhead_s = Fabric(cluster=instant, mesh=mesh).step_overhead_s
    assert again.step_s + overhead_s == pytest.approx(plan.prediction.step_s)
    assert again.peak_bytes == tuple(memory.activations_bytes for memory in plan.prediction.memory)
