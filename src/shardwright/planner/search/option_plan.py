"""The plan of an option: its stages, prediction, reasons and runners-up."""

from collections.abc import Sequence

from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import MeshPlan, Plan, SchedulePlan, StagePlan, identity
from shardwright.planner.chain.division import Division
from shardwright.planner.search.option import Option
from shardwright.planner.search.prediction import predict
from shardwright.planner.search.ranking import (
    rank,
)
from shardwright.planner.search.reasons import alternatives, reasons

__all__ = ["plan_of"]


def plan_of(
    best: Option,
    *,
    graph: ModelGraph,
    config: Config,
    mesh: Mesh,
    options: Sequence[Option],
    division: Division | None,
) -> Plan:
    """Writes down an option."""
    layout = best.layout
    labels = layout.chain.labels
    offload = [False] * len(labels) if layout.offload is None else layout.offload.tolist()
    stages = tuple(
        StagePlan(
            rank=layout.ranks[stage],
            units=tuple(labels[call] for call in layout.calls(stage)),
            recompute=tuple(labels[call] for call in layout.calls(stage) if layout.recompute[call]),
            offload=tuple(labels[call] for call in layout.calls(stage) if offload[call]),
        )
        for stage in range(layout.num_stages)
    )
    others = (
        rank([option for option in options if option is not best], memory_weight=0.0)
        if len(options) > 1
        else []
    )
    return Plan(
        model=identity(graph),
        mesh=MeshPlan(
            pipeline=mesh.pipeline,
            data=mesh.data,
            shard=mesh.shard,
            tensor=mesh.tensor,
            context=mesh.context,
            expert=mesh.expert,
            placement_strategy=mesh.placement,
        ),
        schedule=SchedulePlan(
            kind=best.kind,  # type: ignore[arg-type]
            microbatches=best.num_microbatches,
            active_microbatches=config.active_microbatches,
            reduce_every_microbatch=layout.chain.reductions > 1,
        ),
        stages=stages,
        replicated=layout.replicated(),
        tensor=None if division is None else division.plan_of(graph),
        prediction=predict(best),
        why=reasons(best, others=others, config=config),
        alternatives=alternatives(best, others=others),
        pins=config.pins,
    )
