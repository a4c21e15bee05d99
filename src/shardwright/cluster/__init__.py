"""Machines as data: devices, their memory and rates, the links between them."""

from shardwright.cluster.cluster import (
    Accelerator,
    Cluster,
    Device,
    HostCosts,
    Inventory,
    Link,
    NodeKind,
    Rate,
)
from shardwright.cluster.cluster_file import find_machines, memory_for, usable_bytes
from shardwright.cluster.named import node_kinds, parse_inventory

__all__ = [
    "Accelerator",
    "Cluster",
    "Device",
    "HostCosts",
    "Inventory",
    "Link",
    "NodeKind",
    "Rate",
    "find_machines",
    "memory_for",
    "node_kinds",
    "parse_inventory",
    "usable_bytes",
]
