"""Default prices of NCCL collectives, where there is no measurement."""

import math

from shardwright.collectives.prices import DevicePrices, Line
from shardwright.collectives.topology import Topology

__all__ = ["typical_device_prices"]

# A node with NVLink, and a link of 200 Gbit/s to other nodes for each of its ranks.
_START_S = 1e-5
_HOP_INSIDE_S, _HOP_BETWEEN_S = 2e-6, 8e-6
_INSIDE_BPS, _BETWEEN_BPS = 2e11, 2.5e10
_REORDER = Line(5e-6, 1e12)


def typical_device_prices(topology: Topology) -> DevicePrices:
    """Typical prices of a group on accelerators.

    All-gathers, reduce-scatters and broadcasts go round rings, one for each rank of a node, so that the links
    of a node share what goes to others; all-reduces wait for trees, and move what rings do.
    """
    num_nodes = len(topology.nodes)
    fewest, most = (pick(len(node) for node in topology.nodes) for pick in (min, max))
    links = [_BETWEEN_BPS * fewest] if num_nodes > 1 else [_INSIDE_BPS]
    if most > 1:
        links.append(_INSIDE_BPS)
    return DevicePrices(
        everyone=_lines(num_nodes, most, min(links)),
        across=_lines(num_nodes, 1, _BETWEEN_BPS) if num_nodes > 1 else {},
        inside=_lines(1, most, _INSIDE_BPS) if most > 1 else {},
        reorder=_REORDER,
        source="defaults: nothing was measured, run shardwright probe on GPUs",
    )


def _lines(num_nodes: int, num_local: int, slowest: float) -> dict[str, Line]:
    """Lines for a group."""
    num_ranks = num_nodes * num_local
    moved = max(num_ranks - 1, 1) / num_ranks  # of the bytes of the whole
    hops_between = num_nodes if num_nodes > 1 and num_local > 1 else num_nodes - 1
    round_s = hops_between * _HOP_BETWEEN_S + (num_ranks - num_nodes) * _HOP_INSIDE_S
    tree_s = math.ceil(math.log2(num_nodes)) * _HOP_BETWEEN_S + (num_local - 1) * _HOP_INSIDE_S
    ring = Line(_START_S + round_s, slowest / moved)
    return {
        "all_gather": ring,
        "reduce_scatter": ring,
        "all_reduce": Line(_START_S + 2 * tree_s, slowest / (2 * moved)),
        "broadcast": Line(_START_S + round_s, slowest),
    }
