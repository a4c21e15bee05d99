"""Which grid of ranks is taken."""

import pytest

from shardwright.config import Config
from shardwright.errors import ConfigError, InfeasiblePlanError, PlanError
from shardwright.plan import (
    MemoryPrediction,
    MeshPlan,
    ModelIdentity,
    Plan,
    Prediction,
    SchedulePlan,
    StagePlan,
)
from shardwright.planner import best_of_meshes, meshes


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


def test_near_ties_go_to_the_simplest():
    best = best_of_meshes(
        meshes(2, Config()), lambda mesh: plan_of(mesh, mesh.data * (1 - mesh.pipeline / 500))
    )
    assert (best.mesh.pipeline, best.mesh.shard) == (1, 1)


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
