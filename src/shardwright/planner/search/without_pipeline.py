"""What a batch would take without a pipeline: in one process, and where each rank has all of the model."""

from collections.abc import Mapping

from shardwright.cluster import Cluster
from shardwright.mesh import Mesh
from shardwright.planner.chain.chain import Chain
from shardwright.planner.machines.fabric import Fabric
from shardwright.planner.search.draft import make_draft
from shardwright.planner.search.workload import Demands, Workload

__all__ = ["seconds_without_pipeline"]


def seconds_without_pipeline(
    chains: Mapping[int, Chain], mesh: Mesh, *, cluster: Cluster, demands: Demands
) -> dict[str, float]:
    """Seconds of a step, as `Prediction` has them; none for a mesh that is of another kind."""
    if mesh.pipeline == 1 or mesh.share > 1 or mesh.shard > 1:
        return {}
    meshes = {
        "alone_s": Mesh.of(world_size=1),
        "replicas_s": Mesh.of(world_size=mesh.world_size, data=mesh.world_size, pipeline=1),
    }
    found = {}
    for name, other in meshes.items():
        fabric = Fabric(cluster=cluster, mesh=other)
        seconds = []
        for count, chain in chains.items():
            workload = Workload(chain, num_microbatches=count, fabric=fabric, demands=demands)
            option = make_draft(workload, "1f1b", (0,)).work_out()
            seconds += [option.step_s] if option.fits else []
        found[name] = min(seconds, default=0.0)
    return found
