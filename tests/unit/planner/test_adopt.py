"""Plans from files, and their schedules."""

from pathlib import Path
from typing import Any

import pytest
from graphs import chain_graph, profile_of

from planner.machines import machines
from shardwright.config import Config
from shardwright.errors import PlanError, StalePlanError
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.planner import ACTION_OVERHEAD_S, make_plan, read_plan, schedule_of, stage_costs_of
from shardwright.planner.fabric import Fabric
from shardwright.schedule import build_schedule, simulate

GRAPH = chain_graph(4)


def planned(**config: Any) -> Plan:
    return make_plan(
        {4: (GRAPH, profile_of())},
        cluster=machines(),
        config=Config.parse(config),
        mesh=Mesh(world_size=2, pipeline=2),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    planned(pipeline="1f1b").write(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def read(path: Path, **config: Any) -> Plan:
    return read_plan(Config.parse({"plan": str(path), **config}), graph=GRAPH, world_size=2)


def test_a_plan_without_contradictions(path: Path) -> None:
    assert read(path) == planned(pipeline="1f1b")
    read(path, microbatches=4, partitions=2, pipeline="interleaved", virtual_stages=1, memory_limit="1GiB")


def test_all_contradictions_are_listed(path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        read(
            path,
            microbatches=8,
            partitions=4,
            pipeline="simple",
            activation_checkpointing="full",
            memory_limit=1000,
        )
    title, *lines = str(caught.value).splitlines()
    assert title.startswith(f"the settings contradict plan file {path}")
    assert [line.strip() for line in lines[:4]] == [
        "pipeline_parallel_degree is 4, but the plan has 2.",
        "microbatches is 8, but the plan has 4.",
        "pipeline is 'gpipe', but the plan has '1f1b'.",
        "activation_checkpointing is 'full', but the plan recomputes 0 of 6 units.",
    ]
    assert "memory_limit is 1000 B, but the plan is predicted to need " in lines[4]


def test_another_model(path: Path) -> None:
    with pytest.raises(StalePlanError, match="other units"):
        read_plan(Config.parse({"plan": str(path)}), graph=chain_graph(5), world_size=2)


def test_no_plan_is_named() -> None:
    with pytest.raises(PlanError, match="no plan file is named"):
        read_plan(Config(), graph=GRAPH, world_size=2)


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
    mesh = Mesh(world_size=2, pipeline=2)
    plan = make_plan({4: (GRAPH, profile_of())}, cluster=instant, config=config, mesh=mesh)
    assert any(stage.recompute for stage in plan.stages)
    again = simulate(schedule_of(plan), stage_costs_of(plan) or (), action_overhead_s=ACTION_OVERHEAD_S)
    assert plan.prediction is not None
    overhead_s = Fabric(cluster=instant, mesh=mesh).overhead_s
    assert again.step_s + overhead_s == pytest.approx(plan.prediction.step_s)
    assert again.peak_bytes == tuple(memory.activations for memory in plan.prediction.memory)
