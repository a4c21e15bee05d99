"""``smp.nn.DistributedLayerNorm``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.torch.units.tensor_division import pin_whole
from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule


class DistributedLayerNorm(DistributedModule, nn.LayerNorm):
    """A layer normalisation, which every rank has whole.

    It takes inputs that have more bits than its weights, and normalises with these bits (see
    `fp32_residual_addition`); the result is of the weights' type.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        pin_whole(self)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises; see `nn.LayerNorm`."""
        weight, bias = self.weight, self.bias
        if (
            not self.elementwise_affine
            or input.dtype == weight.dtype
            or torch.is_autocast_enabled(input.device.type)
        ):
            return super().forward(input)
        wide = torch.promote_types(input.dtype, weight.dtype)
        result = F.layer_norm(
            input.to(wide),
            self.normalized_shape,
            weight.to(wide),
            None if bias is None else bias.to(wide),
            self.eps,
        )
        return result.to(weight.dtype)
