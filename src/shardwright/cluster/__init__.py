"""Machines as data: devices, their memory and rates, the links between them."""

from shardwright.cluster.cluster import Cluster, Device, Link
from shardwright.cluster.inventory import Accelerator, Inventory, NodeKind, Rate
from shardwright.cluster.machines import cluster_of, find_machines
from shardwright.cluster.named import node_kinds, parse_inventory

__all__ = [
    "Accelerator",
    "Cluster",
    "Device",
    "Inventory",
    "Link",
    "NodeKind",
    "Rate",
    "cluster_of",
    "find_machines",
    "node_kinds",
    "parse_inventory",
]
