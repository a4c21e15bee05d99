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
from shardwright.costs.inputs import Numbers, Offload, Options, Rates, ScheduleKind
from shardwright.model_graph import Work


def beyond(reached: Efficiencies, seconds: Numbers, computing: Numbers) -> Numbers:
    """Seconds of communication that the computing beside it does not hide.

    Those that it is longer, and at least a share: the first and the last message have no computing beside
    them, and all of them take processors and memory from it.
    """
    return np.maximum(np.minimum(reached.exposed, 1.0) * seconds, seconds - computing)


@dataclass(frozen=True, slots=True)
class Peers:
    """Ranks that exchange, a stride apart, while all groups of their kind do the same."""

    rates: Rates
    reached: Efficiencies
    number: Numbers
    stride: Numbers = 1.0

    @property
    def inside(self) -> Numbers:
        """How many of them share a node."""
        return np.minimum(self.number, np.maximum(1.0, np.floor(self.rates.per_node / self.stride)))

    @property
    def network_rate(self) -> Numbers:
        """Bytes a second of a node: the more nodes, the more of them are in its way."""
        nodes = np.maximum(1.0, self.number * self.stride / self.rates.per_node)
        return self.rates.network_Bps * nodes**-self.reached.contention

    @property
    def latency_s(self) -> Numbers:
        once = np.where(self._are_near, self.rates.link_latency_s, self.rates.network_latency_s)
        return once * np.log2(np.maximum(self.number, 1.0))

    def ring_rate(self, *, gathers: bool = False) -> Numbers:
        """Bytes a second of each rank of a ring."""
        reached = self.reached
        shares = (reached.link, reached.reduce_network)
        of_link, of_network = (reached.gather_link, reached.gather_network) if gathers else shares
        link = self.rates.link_Bps * of_link
        network = self.network_rate * of_network * self.inside / self.rates.per_node
        return np.where(self._are_near, link, np.minimum(link, network))

    def ring_seconds(self, num_bytes: Numbers, *, gathers: bool = False) -> Numbers:
        """Half of an all-reduce: a reduce-scatter or an all-gather of so many bytes."""
        rate = self.ring_rate(gathers=gathers)
        seconds = (self.number - 1) / self.number * num_bytes / rate + self.latency_s
        return np.where(self.number > 1, seconds, 0.0)

    def seconds_by_nodes(self, num_bytes: Numbers) -> Numbers:
        """An all-gather or reduce-scatter in which each byte enters a node once."""
        rates, reached, ranks, inside = self.rates, self.reached, self.number, self.inside
        network = self.network_rate * reached.hierarchical_network * inside / rates.per_node
        across = np.where(ranks > inside, num_bytes * (ranks - inside) / ranks / network, 0.0)
        within = num_bytes * (inside - 1) / inside / (rates.link_Bps * reached.gather_link)
        steps = rates.network_latency_s * np.log2(np.maximum(ranks / inside, 1.0))
        latency = steps + rates.link_latency_s * np.log2(inside)
        return np.where(ranks > 1, np.maximum(across, within) + latency, 0.0)

    @property
    def _are_near(self) -> Numbers:
        return self.number * self.stride <= self.rates.per_node


def hop_seconds(options: Options, num_bytes: Numbers, rates: Rates, reached: Efficiencies) -> Numbers:
    """Messages of a microbatch there and back, at one end of a stage; the slowest hop decides."""
    near = options.pipeline_span <= rates.per_node
    network = np.where(np.asarray(rates.hop_Bps) > 0, rates.hop_Bps, rates.network_Bps)
    rate = np.where(near, rates.link_Bps, network / rates.per_node)
    latency = np.where(near, rates.link_latency_s, rates.network_latency_s)
    once = num_bytes / (rate * reached.point_to_point) + latency
    kind = options.schedule
    crossings = np.where(kind == ScheduleKind.INTERLEAVED, options.virtual, 1.0)
    crossings = np.where(kind == ScheduleKind.ZB_V, 2.0, crossings)
    return np.where(options.pipeline > 1, 2 * crossings * once, 0.0)


def offload_seconds(options: Options, num_bytes: Numbers, rates: Rates) -> Numbers:
    """Transfers of activations to the host and back."""
    once = 2 * num_bytes / np.maximum(rates.host_Bps, 1.0)
    return np.where(options.offload == Offload.ACTIVATIONS, once, 0.0)


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
