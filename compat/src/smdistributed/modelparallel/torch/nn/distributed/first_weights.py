"""First values of the weights of distributed modules."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class FirstWeights:
    """How weights begin.

    Attributes:
        std: standard deviation of a normal distribution around 0; biases are 0 then. None: as PyTorch's own
            modules begin.
    """

    std: float | None = None
    zero: bool = False

    @torch.no_grad()
    def fill(self, weight: Tensor, bias: Tensor | None = None, *, padding_idx: int | None = None) -> bool:
        """Fills them; returns whether anything was to be done."""
        if self.zero:
            weight.zero_()
        elif self.std is not None:
            nn.init.normal_(weight, std=self.std)
        else:
            return False
        if bias is not None:
            bias.zero_()
        if padding_idx is not None:
            weight[padding_idx].zero_()
        return True
