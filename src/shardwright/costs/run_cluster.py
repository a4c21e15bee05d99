"""Machines as one run sees them: achieved rates and the memory left; a run's machines as closed forms do."""

import itertools
from dataclasses import replace
from math import inf

from shardwright.cluster import Cluster, Device, Inventory, Link, NodeKind
from shardwright.cluster.cluster_file import usable_bytes
from shardwright.costs.calibration import REACHED, UNIT_S, Efficiencies, calibration_of, calibration_of_nodes
from shardwright.costs.inputs import Rates
from shardwright.costs.kinds import KindOfRank
from shardwright.costs.step import UPDATE_BYTES, UPDATE_BYTES_32
from shardwright.errors import ConfigError


def cluster_of(machines: Inventory, *, dtype: str) -> Cluster:
    """The machines of a run with one rank on each accelerator."""
    kinds = [kind for kind, _ in machines.nodes]
    sizes = sorted({kind.num_accelerators for kind in kinds})
    if len(sizes) > 1:
        raise ConfigError(
            f"nodes of {machines.name} have {', '.join(map(str, sizes))} accelerators, and runs lay out "
            "their ranks over nodes of one size. Plan for each kind alone, or take as many of each node."
        )
    chips = [kind.accelerator for kind in kinds]
    for chip in chips:
        if dtype not in chip.flops_per_s:
            raise ConfigError(
                f"{chip.name} has no rate for {dtype}; take one of {', '.join(chip.flops_per_s)}."
            )
    slowest = min(kinds, key=lambda kind: kind.accelerator.flops_per_s[dtype])
    reached = calibration_of_nodes(slowest).efficiencies
    network = [kind.network_Bps for kind in kinds]
    if len(kinds) > 1 and machines.between_kinds_Bps is not None:
        network.append(machines.between_kinds_Bps)
    return Cluster(
        device=_device(kinds, slowest, reached, dtype),
        ranks_per_node=sizes[0],
        cores_per_node=min(_cores(kind) for kind in kinds),
        intra_node=Link(
            latency_s=max(kind.link_latency_s for kind in kinds),
            bandwidth_Bps=min(kind.link_Bps for kind in kinds) * reached.link,
            occupancy=_occupancy(kinds),
        ),
        inter_node=Link(
            latency_s=max(kind.network_latency_s for kind in kinds),
            bandwidth_Bps=min(network) * reached.reduce_network,
        ),
        host=_host(kinds),
        slowness=_slowness(machines, slowest.accelerator.flops_per_s[dtype], dtype),
    )


def kinds_of(
    cluster: Cluster, *, num_ranks: int, memory_bytes: int, pace: float = 1.0
) -> tuple[list[KindOfRank], Rates]:
    """The kinds of ranks of a run's machines, for closed forms, with the rates between kinds."""
    device, near, far = cluster.device, cluster.intra_node, cluster.inter_node
    own = calibration_of(device.family).efficiencies
    shares = {**REACHED, "matmul": device.reached, "kernel_s": own.kernel_s * pace}
    reached = replace(own, **shares)

    def rates(slowness: float) -> Rates:
        return Rates(
            flops_per_s=device.flops_per_s / (pace * slowness),
            memory_Bps=device.memory_Bps / (pace * slowness),
            link_Bps=near.bandwidth_Bps,
            network_Bps=far.bandwidth_Bps,
            per_node=float(cluster.ranks_per_node),
            link_latency_s=near.latency_s,
            network_latency_s=far.latency_s,
            # As schedules are simulated: one pipeline, of which one rank of a host sends to the next host.
            hop_Bps=far.bandwidth_Bps * cluster.ranks_per_node,
            host_Bps=0.0 if cluster.host is None else cluster.host.bandwidth_Bps,
        )

    hosts = -(-num_ranks // cluster.ranks_per_node)
    slowness = [cluster.slowness_of(host * cluster.ranks_per_node) for host in range(hosts)]
    runs = [(times, len(list(alike))) for times, alike in itertools.groupby(slowness)]
    kinds = [
        KindOfRank(
            ranks=min(number * cluster.ranks_per_node, num_ranks),
            rates=rates(times),
            reached=reached,
            memory_bytes=memory_bytes or inf,
        )
        for times, number in runs
    ]
    return kinds, rates(max(slowness))


def _device(kinds: list[NodeKind], slowest: NodeKind, reached: Efficiencies, dtype: str) -> Device:
    """The device of a rank on the slowest of some nodes."""
    memory_rate = min(kind.accelerator.memory_Bps for kind in kinds)
    update_bytes = UPDATE_BYTES_32 if dtype == "float32" else UPDATE_BYTES
    return Device(
        name=slowest.accelerator.name,
        family=slowest.accelerator.family,
        memory_bytes=min(usable_bytes(kind) for kind in kinds),
        flops_per_s=slowest.accelerator.flops_per_s[dtype],
        reached=float(min(reached.matmul * reached.matmul_factor, 1.0)),
        memory_Bps=memory_rate * min(reached.memory, 1.0),
        overhead_s=UNIT_S,
        # What is updated has 32 bits, and Adam moves so many bytes for each number.
        update_Bps=memory_rate * reached.update * 4 / update_bytes,
    )


def _slowness(machines: Inventory, least: float, dtype: str) -> tuple[float, ...]:
    of_nodes = [
        least / kind.accelerator.flops_per_s[dtype] for kind, number in machines.nodes for _ in range(number)
    ]
    return tuple(of_nodes) if min(of_nodes) < 1 else ()


def _host(kinds: list[NodeKind]) -> Link | None:
    """The way to the memory of the host; None where devices have no other."""
    slowest = min(kind.accelerator.host_Bps for kind in kinds)
    return Link(latency_s=0.0, bandwidth_Bps=slowest) if slowest else None


def _cores(kind: NodeKind) -> int:
    """Rates that were measured while all ranks computed have in them how these share the cores."""
    return max(kind.cores, kind.num_accelerators) if kind.cores and kind.accelerator.products else kind.cores


def _occupancy(kinds: list[NodeKind]) -> float:
    """On CPUs, messages inside of a node are copied by the cores of its ranks."""
    return 1.0 if any(kind.cores for kind in kinds) else 0.0
