"""The time of messages and collectives over links inside nodes and between them."""

import numpy as np

from shardwright.costs.inputs import Numbers, Rates

__all__ = ["gather_seconds", "hop_seconds", "ring_rate", "ring_seconds"]


def ring_rate(
    rates: Rates, *, ranks: Numbers, stride: Numbers, link_share: Numbers, network_share: Numbers
) -> Numbers:
    """Bytes a second of each rank of a ring, while all groups of its kind do the same."""
    inside = np.minimum(ranks, np.maximum(1.0, np.floor(rates.per_node / stride)))
    link = rates.link_Bps * link_share
    network = rates.network_Bps * network_share * inside / rates.per_node
    return np.where(ranks * stride <= rates.per_node, link, np.minimum(link, network))


def ring_seconds(
    rates: Rates, num_bytes: Numbers, *, ranks: Numbers, stride: Numbers, rate: Numbers
) -> Numbers:
    """Half of an all-reduce: a reduce-scatter or an all-gather of so many bytes, with logarithmic latency."""
    near = ranks * stride <= rates.per_node
    latency = np.where(near, rates.link_latency_s, rates.network_latency_s)
    seconds = (ranks - 1) / ranks * num_bytes / rate + latency * np.log2(np.maximum(ranks, 1.0))
    return np.where(ranks > 1, seconds, 0.0)


def gather_seconds(
    rates: Rates,
    num_bytes: Numbers,
    *,
    ranks: Numbers,
    stride: Numbers,
    link_share: Numbers,
    network_share: Numbers,
) -> Numbers:
    """An all-gather or reduce-scatter in which each byte enters a node once.

    Over the network go ``M (p - k) / p`` bytes of the M, for groups of p ranks with k on each node; inside of
    nodes, at the same time, ``M (k - 1) / k``.
    """
    inside = np.minimum(ranks, np.maximum(1.0, np.floor(rates.per_node / stride)))
    network = rates.network_Bps * network_share * inside / rates.per_node
    across = np.where(ranks > inside, num_bytes * (ranks - inside) / ranks / network, 0.0)
    within = num_bytes * (inside - 1) / inside / (rates.link_Bps * link_share)
    steps = rates.network_latency_s * np.log2(np.maximum(ranks / inside, 1.0))
    latency = steps + rates.link_latency_s * np.log2(inside)
    return np.where(ranks > 1, np.maximum(across, within) + latency, 0.0)


def hop_seconds(rates: Rates, num_bytes: Numbers, *, share: Numbers, near: Numbers) -> Numbers:
    """A message to the next stage, while every rank sends one; the slowest hop decides."""
    network = np.where(np.asarray(rates.hop_Bps) > 0, rates.hop_Bps, rates.network_Bps)
    rate = np.where(near, rates.link_Bps, network / rates.per_node)
    latency = np.where(near, rates.link_latency_s, rates.network_latency_s)
    return num_bytes / (rate * share) + latency
