"""A model as a chain of layers, the form in which any network is cut into stages."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Layer", "LayerChain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The work of one layer for one sample.

    Attributes:
        parameters: that it trains; those that several layers use, on the first of them.
        flops: of the forward's products; a multiply-add counts as two.
        moved: numbers that the forward reads and writes, parameters apart.
        kept: numbers that are kept for the backward.
        inputs: numbers that it reads from layers before: what recomputation keeps instead.
        crossing: numbers that go to later layers, this one's output and what passes it by.
        attention: FLOPs of fused attention, without what a causal mask hides.
        products: products or convolutions, a kernel each.
        kernels: other kernels: a normalisation, an activation, an addition.
        product_moved: numbers that products read and write, half of them, parameters apart.
        collectives: of the ranks that share the layer, in a forward and backward; 0 where one has all of it.
        sent: numbers that one of them sends meanwhile.
        dispatch_s: seconds that Python takes for their operations, whatever the samples.
    """

    name: str
    parameters: int
    flops: float
    moved: float
    kept: float
    inputs: float
    crossing: float
    attention: float = 0.0
    products: float = 1.0
    kernels: float = 3.0
    product_moved: float = 0.0
    collectives: float = 0.0
    sent: float = 0.0
    dispatch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChain:
    """A model that is cut between layers. With a tensor degree, layers are those of one rank of its group.

    Attributes:
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
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """FLOPs of the forward of a sample."""
        return sum(layer.flops + layer.attention for layer in self.layers)

    def column(self, name: str) -> Sequence[float]:
        """One attribute of all layers."""
        return [getattr(layer, name) for layer in self.layers]
