"""Machines as data: devices, their memory and rates, the links between them."""

from shardwright.cluster.cluster import Cluster, Device, Link

__all__ = ["Cluster", "Device", "Link"]
