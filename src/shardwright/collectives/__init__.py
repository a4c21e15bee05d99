"""Collectives as pure data: each rank's copies, sums, sends and receives, and their cost."""

from shardwright.collectives.algorithms import (
    all_gather,
    all_reduce,
    all_reduce_at_once,
    broadcast,
    gather_to_nodes,
    reduce_scatter,
)
from shardwright.collectives.steps import Memory, Span, Step, Topology

__all__ = [
    "Memory",
    "Span",
    "Step",
    "Topology",
    "all_gather",
    "all_reduce",
    "all_reduce_at_once",
    "broadcast",
    "gather_to_nodes",
    "reduce_scatter",
]
