"""The prediction of an option, in the form of the plan file."""

import math
from dataclasses import asdict, replace

from shardwright.cluster import Link
from shardwright.plan import Prediction, StagePrediction
from shardwright.plan.prediction import Conditions, FlowConditions, LinkConditions
from shardwright.planner.chain.estimate import error_of
from shardwright.planner.machines.fabric import Fabric
from shardwright.planner.search.option import Option

__all__ = ["predict"]

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
    """Seconds of the update on the rank that updates most."""
    device = option.workload.fabric.cluster.device
    most = max(state.optimized for state in option.layout.state_bytes())
    return most / (device.update_Bps or device.memory_Bps / _MOVED_BY_ADAM)


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
        intra_node=_link(fabric.cluster.intra_node),
        inter_node=_link(fabric.cluster.inter_node),
        host=None if fabric.host is None or not layout.offloads else _link(fabric.host),
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


def _link(link: Link) -> LinkConditions:
    bandwidth_Bps = link.bandwidth_Bps if math.isfinite(link.bandwidth_Bps) else None
    return LinkConditions(latency_s=link.latency_s, bandwidth_Bps=bandwidth_Bps, occupancy=link.occupancy)


def _sync_latency_s(option: Option) -> float:
    """Seconds of the sums of gradients on links of the same latency where bytes take no time."""
    fabric = option.workload.fabric
    endless = {
        name: replace(getattr(fabric.cluster, name), bandwidth_Bps=math.inf)
        for name in ("intra_node", "inter_node")
    }
    bare = Fabric(cluster=replace(fabric.cluster, **endless), mesh=fabric.mesh)
    return bare.tie_seconds(option.layout) + bare.replica_seconds(option.layout).total_s
