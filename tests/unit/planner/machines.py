"""Machines for tests."""

from shardwright.cluster import Cluster, Device, Link


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
