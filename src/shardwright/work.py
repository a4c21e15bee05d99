"""The work of a piece of a model in its forward: machine-independent counts that add up."""

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Counts of one forward: numbers, or arrays with an entry for each candidate.

    Attributes:
        products: matrix products and convolutions, a kernel each.
        product_flops: their floating-point operations; a multiply-add counts as two.
        product_bytes: what they read and write, half of it: they compute meanwhile.
        attention_flops: of fused attention, without what a causal mask hides.
        kernels: all other operations that launch a kernel.
        moved_bytes: what these read and write.

    >>> Work(products=1, product_flops=8) + Work(kernels=2)
    Work(products=1, product_flops=8, product_bytes=0, attention_flops=0, kernels=2, moved_bytes=0)
    """

    products: Any = 0
    product_flops: Any = 0
    product_bytes: Any = 0
    attention_flops: Any = 0
    kernels: Any = 0
    moved_bytes: Any = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(  # by hand: a trace adds one for each operation
            products=self.products + other.products,
            product_flops=self.product_flops + other.product_flops,
            product_bytes=self.product_bytes + other.product_bytes,
            attention_flops=self.attention_flops + other.attention_flops,
            kernels=self.kernels + other.kernels,
            moved_bytes=self.moved_bytes + other.moved_bytes,
        )

    def of_size(self, share: float) -> "Work":
        """The work of as many kernels on a share of the numbers.

        >>> Work(products=1, product_flops=8).of_size(0.5).product_flops
        4.0
        """
        if share == 1:
            return self
        counts = {"products", "kernels"}
        return Work(
            **{f.name: getattr(self, f.name) * (1 if f.name in counts else share) for f in fields(self)}
        )
