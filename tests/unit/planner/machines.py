"""Machines for tests, and every way to train on them."""

from shardwright.cluster import Cluster, Device, Link
from shardwright.costs import Options
from shardwright.planner.ways import Task
from shardwright.planner.ways.space import completed, meshes, scheduled


def machines(
    *,
    memory_bytes: int = 0,
    ranks_per_node: int = 8,
    cores_per_node: int = 0,
    intra: tuple[float, float] = (1e-5, 1e9),
    inter: tuple[float, float] = (1e-4, 1e8),
) -> Cluster:
    """A cluster; links are (latency in seconds, bytes per second)."""
    return Cluster(
        device=Device(name="test", memory_bytes=memory_bytes),
        ranks_per_node=ranks_per_node,
        cores_per_node=cores_per_node,
        intra_node=Link(latency_s=intra[0], bandwidth_Bps=intra[1]),
        inter_node=Link(latency_s=inter[0], bandwidth_Bps=inter[1]),
    )


def all_ways(task: Task) -> Options:
    """Every way that the machines, the batch, the model and the pins allow."""
    return completed(task, scheduled(task, meshes(task)))
