"""The conditions of an option, in the form of the plan file."""

import math
from dataclasses import replace

from shardwright.cluster import Link
from shardwright.costs.own_runtime import ACTION_S
from shardwright.plan.conditions import Conditions, FlowConditions, LinkConditions
from shardwright.planner.fabric import Fabric
from shardwright.planner.option import Option

__all__ = ["conditions_of"]


def conditions_of(option: Option) -> Conditions:
    """What an option was simulated with."""
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
        cores=fabric.cores,
        ranks_per_node=fabric.ranks_per_node,
        crowding=fabric.crowding,
        action_overhead_s=ACTION_S,
        step_overhead_s=fabric.step_overhead_s,
        tie_s=option.tie_s,
        sync_latency_s=min(_sync_latency_s(option), option.tie_s + option.replica_s.exposed_s),
        hidden_s=option.replica_s.hidden_s,
        window_s=option.replica_s.window_s,
        memory_limit_bytes=option.workload.demands.limit_bytes,
    )


def _link(link: Link) -> LinkConditions:
    bandwidth_Bps = link.bandwidth_Bps if math.isfinite(link.bandwidth_Bps) else None
    return LinkConditions(latency_s=link.latency_s, bandwidth_Bps=bandwidth_Bps, occupancy=link.occupancy)


def _sync_latency_s(option: Option) -> float:
    """What is left of the sums of gradients on links of the same latency where bytes take no time."""
    fabric = option.workload.fabric
    endless = {
        name: replace(getattr(fabric.cluster, name), bandwidth_Bps=math.inf)
        for name in ("intra_node", "inter_node")
    }
    bare = Fabric(cluster=replace(fabric.cluster, **endless), mesh=fabric.mesh)
    return bare.tie_seconds(option.layout) + bare.replica_seconds(option.layout).total_s
