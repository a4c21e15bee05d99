"""The one price of computing: seconds of a piece of work on one rank, whoever asks.

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

from shardwright.costs.efficiencies import Efficiencies
from shardwright.costs.inputs import Numbers
from shardwright.work import Work

__all__ = ["ATTENTION_BACKWARD", "ELEMENTWISE_BACKWARD", "Price", "RankRates"]

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
