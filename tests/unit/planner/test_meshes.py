"""Which grid of ranks is taken.

Parameters that replicas share: what a rank needs, and when gradients are reduced.

Plans from files, and their schedules.
"""

from typing import Any

import pytest
from graphs import chain_graph, profile_of
from planned import usual_conditions

from planner.machines import machines
from shardwright.config import Config
from shardwright.costs.calibration import ACTION_S
from shardwright.errors import ConfigError, InfeasiblePlanError, PlanError
from shardwright.mesh import Mesh
from shardwright.plan import (
    MemoryPrediction,
    MeshPlan,
    ModelIdentity,
    Plan,
    Prediction,
    SchedulePlan,
    StagePlan,
)
from shardwright.planner import (
    best_of_meshes,
    build_chain,
    make_plan,
    meshes,
    overruled_settings,
    schedule_of,
    stage_costs_of,
)
from shardwright.planner.drafts import Sharing
from shardwright.planner.fabric import Fabric
from shardwright.planner.layout import Layout
from shardwright.schedule import build_schedule, simulate


def plan_of(mesh, step_s):
    memory = MemoryPrediction(parameters_bytes=1, gradients_bytes=1, optimizer_bytes=2, activations_bytes=1)
    return Plan(
        model=ModelIdentity(fingerprint="f", num_parameters=1, units=("a",)),
        mesh=MeshPlan(pipeline=mesh.pipeline, data=mesh.data, shard=mesh.shard),
        schedule=SchedulePlan(kind="1f1b", microbatches=1),
        stages=tuple(StagePlan(rank=rank, units=("a",) * (rank == 0)) for rank in range(mesh.pipeline)),
        prediction=Prediction(
            step_s=step_s,
            bubble=0.0,
            stages=({"forward_s": 1.0, "backward_s": 1.0},) * mesh.pipeline,
            memory=(memory,),
            provenance="estimated",
            conditions=usual_conditions(mesh.pipeline),
        ),
        why=("Because.",),
    )


def degrees(found):
    return [(mesh.pipeline, mesh.data, mesh.shard) for mesh in found]


def test_what_is_set_stays():
    assert degrees(meshes(8, Config.parse({"pipeline_parallel_degree": 4}))) == [(4, 2, 1), (4, 2, 2)]
    assert degrees(meshes(8, Config.parse({"data_parallel_degree": 2}))) == [(4, 2, 1), (4, 2, 2)]
    shared = degrees(meshes(8, Config.parse({"sharded_data_parallel_degree": 4})))
    assert shared == [(1, 8, 4), (2, 4, 4)]
    assert degrees(meshes(4, Config.parse({"ddp": False}))) == [(4, 1, 1)]
    assert degrees(meshes(1, Config())) == [(1, 1, 1)]
    with pytest.raises(ConfigError, match="3"):
        meshes(8, Config.parse({"pipeline_parallel_degree": 3}))


def test_most_samples_a_second_win():
    times = {(1, 4): 4.0, (2, 2): 1.5, (4, 1): 1.0}
    best = best_of_meshes(
        meshes(4, Config()),
        lambda mesh: plan_of(mesh, times[mesh.pipeline, mesh.data] * (1 + mesh.shard / 10)),
    )
    # 1.1 * 1.5 / 2 seconds a replica, against 1.1 * 4 / 4 and 1.1.
    assert (best.mesh.pipeline, best.mesh.data, best.mesh.shard) == (2, 2, 1)
    assert best.why[0] == "Because."
    assert best.why[-1].startswith(
        "Degrees: pipeline 2 x data 2 (1.65 s a step), the most samples a second of 6"
    )
    assert "pipeline 1 x data 4 (4.40 s a step) +33.3%" in best.why[-1]


def test_grids_that_cannot_be_planned_are_counted():
    def make(mesh):
        if mesh.data > 1:
            raise InfeasiblePlanError("too large")
        return plan_of(mesh, 1.0)

    best = best_of_meshes(meshes(4, Config()), make)
    assert best.mesh.pipeline == 4
    assert "(5 cannot be planned, or do not fit)" in best.why[-1]


def test_no_grid_can_be_planned():
    def make(mesh):
        raise (InfeasiblePlanError("too large") if mesh.data == 2 else PlanError("too few units"))

    with pytest.raises(InfeasiblePlanError, match="too large"):
        best_of_meshes(meshes(4, Config()), make)


BLOCKS, MICROBATCHES, BLOCK_BYTES = 4, 4, 400


def graph_and_profile() -> Any:
    times = {"embed": (0.1, 0.2), "block": (0.2, 0.4), "head": (0.2, 0.4)}
    return chain_graph(BLOCKS), profile_of(times, saved_bytes=100, input_bytes=10)


def plan(**config: Any) -> Plan:
    settings = {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 1, **config}
    mesh = Mesh.of(world_size=8, pipeline=2, data=4, shard=4)
    return make_plan(
        {MICROBATCHES: graph_and_profile()}, cluster=machines(), config=Config.parse(settings), mesh=mesh
    )


def peak(found: Plan) -> int:
    assert found.prediction is not None
    return max(memory.peak_bytes for memory in found.prediction.memory)


def test_gradients_are_reduced_in_every_microbatch_where_memory_requires_it() -> None:
    roomy = plan(pipeline="1f1b", activation_checkpointing="none")
    assert not roomy.schedule.reduce_every_microbatch
    limit = peak(roomy) - 1
    tight = plan(pipeline="1f1b", activation_checkpointing="none", memory_limit=limit)
    assert tight.schedule.reduce_every_microbatch
    assert peak(tight) <= limit
    assert any("reduced in every microbatch" in reason for reason in tight.why)
    with pytest.raises(InfeasiblePlanError):
        plan(pipeline="1f1b", activation_checkpointing="none", memory_limit=peak(tight) - 1)


@pytest.mark.parametrize(("most", "share"), [(10**9, 1.0), (150, 150 / 600), (1, 1 / 600)])
def test_what_is_gathered_from_other_hosts_has_a_limit(most: int, share: float) -> None:
    config = Config.parse(
        {
            "sharded_data_parallel_degree": 4,
            "sdp_param_persistence_threshold": 1,
            "sdp_max_live_parameters": most,
        }
    )
    mesh = Mesh.of(world_size=4, data=4, shard=4)
    chain = build_chain(*graph_and_profile())
    found = []
    for ranks_per_node in (4, 2):
        (way,) = Sharing.ways(config, mesh, machines(ranks_per_node=ranks_per_node), num_microbatches=1)
        shared = way.applied(chain)
        calls = shared.num_calls
        (state,) = Layout(chain=shared, cuts=(0, calls), ranks=(0,), recompute=[False] * calls).state_bytes()  # type: ignore[arg-type]
        found.append(state.parameters)
    whole = sum(use.num_bytes for use in chain.parameters)
    # Two ranks of a host keep half of what is gathered each.
    assert found[1] - found[0] == pytest.approx(whole / 2 * share, abs=2)


def test_rows_that_come_and_go_are_gathered_for_every_forward_and_backward() -> None:
    steps = []
    for most in (10**9, 1):
        found = make_plan(
            {MICROBATCHES: graph_and_profile()},
            cluster=machines(ranks_per_node=2, inter=(0, 1e4)),
            config=Config.parse(
                {
                    "sharded_data_parallel_degree": 4,
                    "sdp_param_persistence_threshold": 1,
                    "sdp_max_live_parameters": most,
                }
            ),
            mesh=Mesh.of(world_size=4, data=4, shard=4),
        )
        assert found.prediction is not None
        steps.append(found.prediction.step_s)
    whole_bytes = (BLOCKS + 2) * BLOCK_BYTES
    once_s = 3 / 4 * whole_bytes / 1e4
    # Where all come at once, some of them do so while the first forward computes.
    assert (2 * MICROBATCHES - 1) * once_s <= steps[1] - steps[0] < 2 * MICROBATCHES * once_s


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
