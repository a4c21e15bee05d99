"""A model as a chain of layers: what any network comes down to when it is cut into stages."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Layer", "LayerChain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer does for one sample.

    Attributes:
        name: for display.
        parameters: that it trains; those that several layers use, on the first of them.
        flops: of the forward; a multiply-add counts as two.
        moved: numbers that the forward reads and writes, parameters apart.
        kept: numbers that are kept for the backward.
        inputs: numbers that it reads from layers before: what recomputation keeps instead.
        crossing: numbers that go to later layers, this one's output and what passes it by.
    """

    name: str
    parameters: int
    flops: float
    moved: float
    kept: float
    inputs: float
    crossing: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChain:
    """A model that is cut between layers, and in no other way: all other degrees than replicas are 1.

    Attributes:
        name: for display.
        layers: in the order in which they are computed.
        sample: what a sample is, in words.
        source: where the numbers are from.
    """

    name: str
    layers: tuple[Layer, ...]
    sample: str = "sample"
    source: str = ""

    @property
    def num_parameters(self) -> int:
        """Of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Of the forward of a sample."""
        return sum(layer.flops for layer in self.layers)

    def column(self, name: str) -> Sequence[float]:
        """One attribute of all layers."""
        return [getattr(layer, name) for layer in self.layers]
