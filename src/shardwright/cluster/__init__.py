"""Machines as data: devices, their memory and rates, the links between them."""

from shardwright.cluster.cluster import Cluster, Device, Link
from shardwright.cluster.inventory import Accelerator, Inventory, NodeKind
from shardwright.cluster.named import node_kinds, parse_inventory

__all__ = [
    "Accelerator",
    "Cluster",
    "Device",
    "Inventory",
    "Link",
    "NodeKind",
    "node_kinds",
    "parse_inventory",
]
