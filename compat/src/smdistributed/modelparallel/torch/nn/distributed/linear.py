"""``smp.nn.DistributedLinear``."""

from typing import Any

from torch import nn

from shardwright.torch.units.tensor_division import Pin, pin
from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule
from smdistributed.modelparallel.torch.nn.distributed.first_weights import FirstWeights

__all__ = ["DistributedLinear"]


class DistributedLinear(DistributedModule, nn.Linear):
    """A linear layer, of which each rank has some input channels.

    Args:
        in_features: input channels, of all ranks together.
        out_features: output channels.
        bias: whether it has a bias, which every rank has.
        device: as for `nn.Linear`.
        dtype: as for `nn.Linear`.
        cut: ``"input"`` or ``"output"`` channels are cut, or ``"none"``.
        block: so many channels stay together.
        first: how its weights begin.
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
