"""The time of messages and collectives over links inside nodes and between them.

The one price of computing: seconds of a piece of work on one rank, whoever asks.

::

    forward   products:   kernels + FLOPs / (peak * matmul) + half of the bytes / memory
              attention:  FLOPs / (peak * flash_forward)
              the rest:   kernels + bytes * elementwise / memory
    backward  2 * products + FLOPs of attention * 2.5 / (peak * flash_backward) + 1.6 * the rest

It prices the closed forms of a transformer's block, a chain of layers and a traced unit alike.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.costs.calibration import Efficiencies
from shardwright.costs.inputs import Numbers, Rates
from shardwright.model_graph import Work


def beyond(reached: Efficiencies, seconds: Numbers, computing: Numbers) -> Numbers:
    """Seconds of communication that the computing beside it does not hide.

    Those that it is longer, and at least a share: the first and the last message have no computing beside
    them, and all of them take processors and memory from it.
    """
    return np.maximum(np.minimum(reached.exposed, 1.0) * seconds, seconds - computing)


def network_rate(rates: Rates, reached: Efficiencies, *, ranks: Numbers, stride: Numbers) -> Numbers:
    """Bytes a second of a node for a group over several: the more nodes, the more of them are in its way."""
    nodes = np.maximum(1.0, ranks * stride / rates.per_node)
    return rates.network_Bps * nodes**-reached.contention


def inside_of_node(rates: Rates, *, ranks: Numbers, stride: Numbers) -> Numbers:
    """How many ranks of a group share a node."""
    return np.minimum(ranks, np.maximum(1.0, np.floor(rates.per_node / stride)))


def ring_rate(
    rates: Rates,
    reached: Efficiencies,
    *,
    ranks: Numbers,
    stride: Numbers,
    link_share: Numbers,
    network_share: Numbers,
) -> Numbers:
    """Bytes a second of each rank of a ring, while all groups of its kind do the same."""
    inside = inside_of_node(rates, ranks=ranks, stride=stride)
    link = rates.link_Bps * link_share
    of_node = network_rate(rates, reached, ranks=ranks, stride=stride)
    network = of_node * network_share * inside / rates.per_node
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
    reached: Efficiencies,
    num_bytes: Numbers,
    *,
    ranks: Numbers,
    stride: Numbers,
    link_share: Numbers,
    network_share: Numbers,
) -> Numbers:
    """An all-gather or reduce-scatter in which each byte enters a node once."""
    inside = inside_of_node(rates, ranks=ranks, stride=stride)
    of_node = network_rate(rates, reached, ranks=ranks, stride=stride)
    network = of_node * network_share * inside / rates.per_node
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


ATTENTION_BACKWARD = 2.5
"""Operations of fused attention in the backward, for each of the forward."""

ELEMENTWISE_BACKWARD = 1.6
"""Seconds of all other kernels in the backward, for each of the forward."""


class Price(NamedTuple):
    """Seconds of a piece of work.

    Attributes:
        weight: of the gradients of weights, which are a part of that.
    """

    forward: Numbers
    backward: Numbers
    weight: Numbers


@dataclass(frozen=True, slots=True)
class RankRates:
    """The achieved rates of one rank.

    Attributes:
        peak: of dense matrix products, FLOPs a second.
        memory: of the accelerator's memory, bytes a second.
    """

    peak: Numbers
    memory: Numbers
    reached: Efficiencies

    @property
    def flops_rate(self) -> Numbers:
        """FLOPs a second of large matrix products."""
        return self.peak * np.minimum(self.reached.matmul * self.reached.matmul_factor, 1.0)

    @property
    def memory_rate(self) -> Numbers:
        """Bytes a second of elementwise kernels."""
        return self.memory * np.minimum(self.reached.memory, 1.0)

    def price(self, work: Work) -> Price:
        """Seconds of some work; of arrays, an entry for each."""
        reached = self.reached
        products = (
            work.products * reached.kernel_s
            + work.product_flops / self.flops_rate
            + work.product_bytes / self.memory_rate
        )
        rest = work.kernels * reached.kernel_s + work.moved_bytes * reached.elementwise / self.memory_rate
        attention = work.attention_flops / self.peak
        return Price(
            forward=products + attention / reached.flash_forward + rest,
            backward=2 * products
            + ATTENTION_BACKWARD * attention / reached.flash_backward
            + ELEMENTWISE_BACKWARD * rest,
            weight=products,
        )
