"""Machines as a command takes them, by name or as a file; and an inventory as one run sees it."""

from pathlib import Path

from shardwright.cluster.cluster import Cluster, Device, Link
from shardwright.cluster.cluster_file import read_inventory
from shardwright.cluster.inventory import Inventory, NodeKind
from shardwright.cluster.named import parse_inventory
from shardwright.errors import ConfigError
from shardwright.units import format_bytes

__all__ = ["DEVICE_BASE_BYTES", "DEVICE_MARGIN", "cluster_of", "find_machines", "usable_bytes"]

DEVICE_MARGIN = 0.06
"""Of memory, what an allocator cannot use."""

DEVICE_BASE_BYTES = 1.5 * 2**30
"""Of memory, what the driver and its kernels take."""

_FILES = (".yaml", ".yml", ".json")


def find_machines(text: str) -> Inventory:
    """Machines by name, such as ``p4d.24xlarge*4``, or the path of a cluster file.

    Raises:
        ConfigError: there are none of the name, or the file cannot be used.
    """
    return read_inventory(text) if Path(text).suffix in _FILES else parse_inventory(text)


def usable_bytes(kind: NodeKind) -> int:
    """Memory that the tensors of a rank may fill: without what drivers and allocators keep from them.

    Raises:
        ConfigError: nothing is left.
    """
    memory = kind.accelerator.memory_bytes
    if kind.cores:
        return memory
    usable = int(memory / (1 + DEVICE_MARGIN) - DEVICE_BASE_BYTES)
    if usable <= 0:
        raise ConfigError(
            f"{kind.accelerator.name} has {format_bytes(memory)}, of which drivers and allocators take "
            f"{DEVICE_MARGIN:.0%} and {format_bytes(DEVICE_BASE_BYTES)}: nothing is left for a model. Check "
            "its memory in the cluster file."
        )
    return usable


def cluster_of(machines: Inventory, *, dtype: str) -> Cluster:
    """What a run of one rank an accelerator sees of some machines.

    Of several kinds the slowest counts, but for computing: faster nodes take less of what costs say.

    Args:
        machines: by kinds of nodes.
        dtype: of matrix products.

    Raises:
        ConfigError: the rate for the dtype is not known, or nodes have different numbers of accelerators.
    """
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
    slowest = min(chips, key=lambda chip: chip.flops_per_s[dtype])
    network = [kind.network_Bps for kind in kinds]
    if len(kinds) > 1 and machines.between_kinds_Bps is not None:
        network.append(machines.between_kinds_Bps)
    return Cluster(
        device=Device(
            name=slowest.name,
            memory_bytes=min(usable_bytes(kind) for kind in kinds),
            flops_per_s=slowest.flops_per_s[dtype],
            reached=1.0 if slowest.products else Device.reached,
            memory_Bps=min(chip.memory_Bps for chip in chips),
        ),
        ranks_per_node=sizes[0],
        cores_per_node=min(_cores(kind) for kind in kinds),
        intra_node=Link(
            latency_s=max(kind.link_latency_s for kind in kinds),
            bandwidth_Bps=min(kind.link_Bps for kind in kinds),
            occupancy=_occupancy(kinds),
        ),
        inter_node=Link(latency_s=max(kind.network_latency_s for kind in kinds), bandwidth_Bps=min(network)),
        slowness=_slowness(machines, slowest.flops_per_s[dtype], dtype),
    )


def _slowness(machines: Inventory, least: float, dtype: str) -> tuple[float, ...]:
    of_nodes = [
        least / kind.accelerator.flops_per_s[dtype] for kind, number in machines.nodes for _ in range(number)
    ]
    return tuple(of_nodes) if min(of_nodes) < 1 else ()


def _cores(kind: NodeKind) -> int:
    """Rates that were measured while all ranks computed have in them how these share the cores."""
    return max(kind.cores, kind.num_accelerators) if kind.cores and kind.accelerator.products else kind.cores


def _occupancy(kinds: list[NodeKind]) -> float:
    """On CPUs, messages inside of a node are copied by the cores of its ranks."""
    return 1.0 if any(kind.cores for kind in kinds) else 0.0
