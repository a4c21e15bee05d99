"""The prediction of an option, in the form of the plan file."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import MeshPlan, Plan, Prediction, SchedulePlan, StagePlan, StagePrediction, identity
from shardwright.plan.prediction import Conditions, FlowConditions
from shardwright.planner.division import Division
from shardwright.planner.draft import Option
from shardwright.planner.fabric import Fabric
from shardwright.planner.profiles import error_of
from shardwright.planner.reasons import alternatives, rank, reasons

_MOVED_BY_ADAM = 7  # numbers for each parameter: four are read, three are written


def predict(option: Option) -> Prediction:
    """The simulator's prediction, in the form of the plan file."""
    layout = option.layout
    sends = [0] * layout.num_stages
    for edge in layout.edges():
        sends[edge.source] += edge.num_bytes
    exchanges = [layout.exchange(stage) for stage in range(layout.num_stages)]
    stages = tuple(
        StagePrediction(
            **asdict(cost.whole),
            recompute_s=cost.recompute_s,
            offload_bytes=cost.offload_bytes,
            window_bytes=cost.window_bytes,
            tail_bytes=cost.tail_bytes,
            send_bytes=sent,
            parameter_bytes=held,
            **exchange,
        )
        for cost, sent, held, exchange in zip(
            layout.stage_costs(), sends, layout.stage_parameter_bytes(), exchanges, strict=True
        )
    )
    return Prediction(
        step_s=option.step_s,
        sync_s=option.tie_s + option.settling_s + option.replica_s.exposed_s,
        bubble=min(1.0, max(0.0, option.simulation.bubble)),
        stages=stages,
        memory=option.memory,
        provenance=layout.chain.provenance,
        update_s=_update_seconds(option),
        error=error_of(layout.chain.provenance, option.workload.fabric.cluster.device),
        conditions=_conditions(option),
    )


def _update_seconds(option: Option) -> float:
    """Seconds of the update on the rank that updates most, and of what ranks that share it gather."""
    device = option.workload.fabric.cluster.device
    rate = device.update_Bps or device.memory_Bps / _MOVED_BY_ADAM
    layout = option.layout
    gather_s = option.workload.fabric.update_gather_seconds(layout)
    return gather_s + max(
        state.optimized / rate + device.update_s * number
        for state, number in zip(layout.state_bytes(), layout.num_trained(), strict=True)
    )


def _conditions(option: Option) -> Conditions:
    """The conditions of an option's simulation."""
    fabric, layout = option.workload.fabric, option.layout
    return Conditions(
        flows=tuple(
            FlowConditions(
                source=edge.source,
                target=edge.target,
                num_bytes=edge.num_bytes,
                gradient_bytes=edge.backward_bytes,
            )
            for edge in layout.edges()
        ),
        hosts=tuple(
            fabric.mesh.rank_of(pp=rank) // fabric.cluster.ranks_per_node
            for rank in range(fabric.mesh.pipeline)
        ),
        intra_node=fabric.cluster.intra_node,
        inter_node=fabric.cluster.inter_node,
        host=None if fabric.host is None or not layout.offloads else fabric.host,
        cores=fabric.cores,
        ranks_per_node=fabric.ranks_per_node,
        crowding=fabric.crowding,
        action_overhead_s=fabric.host_costs.action_s,
        forward_overhead_s=option.workload.forward_overhead_s(layout),
        step_overhead_s=fabric.step_overhead_s,
        tie_s=option.tie_s,
        settling_s=option.settling_s,
        sync_latency_s=min(
            _sync_latency_s(option), option.tie_s + option.settling_s + option.replica_s.exposed_s
        ),
        hidden_s=option.replica_s.hidden_s,
        window_s=option.replica_s.window_s,
        memory_limit_bytes=option.workload.demands.limit_bytes,
    )


def _sync_latency_s(option: Option) -> float:
    """Seconds of the sums of gradients on links of the same latency where bytes take no time."""
    fabric = option.workload.fabric
    endless = {
        name: replace(getattr(fabric.cluster, name), bandwidth_Bps=math.inf)
        for name in ("intra_node", "inter_node")
    }
    bare = Fabric(cluster=replace(fabric.cluster, **endless), mesh=fabric.mesh)
    return bare.tie_seconds(option.layout) + bare.replica_seconds(option.layout).total_s


def plan_of(
    best: Option,
    *,
    graph: ModelGraph,
    config: Config,
    mesh: Mesh,
    options: Sequence[Option],
    division: Division | None,
) -> Plan:
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
        mesh=MeshPlan.of(mesh),
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
