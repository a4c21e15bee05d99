"""``smp.nn.DistributedLinear``."""

from typing import Any

from torch import nn

from shardwright.torch.units.tensor_division import Pin, pin
from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule
from smdistributed.modelparallel.torch.nn.distributed.first_weights import FirstWeights


class DistributedLinear(DistributedModule, nn.Linear):
    """A linear layer, of which each rank has some input channels.

    Args:
        bias: whether it has a bias, which every rank has.
    """

    first = FirstWeights()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        cut: str = "input",
        block: int = 1,
        first: FirstWeights = first,
    ):
        vars(self)["first"] = first  # before the parent's constructor, which fills the weights
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        dim = {"output": 0, "input": 1, "none": None}[cut]
        pin(self, "weight", Pin(dim, block))
        pin(self, "bias", Pin(dim, block) if cut == "output" else Pin(None))

    def reset_parameters(self) -> None:
        """Fills weight and bias with their first values."""
        if not self.first.fill(self.weight, self.bias):
            super().reset_parameters()
