"""``smp.nn.DistributedTransformerOutputLayer``."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule
from smdistributed.modelparallel.torch.nn.distributed.first_weights import FirstWeights
from smdistributed.modelparallel.torch.nn.distributed.layer_norm import DistributedLayerNorm
from smdistributed.modelparallel.torch.nn.distributed.linear import DistributedLinear
from smdistributed.modelparallel.torch.nn.distributed.options import LayerOptions
from smdistributed.modelparallel.torch.nn.distributed.precision import sum_with_residual

Activation = str | Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


class DistributedTransformerOutputLayer(DistributedModule):
    """The feed-forward half of a transformer layer; each rank has some intermediate channels.

    Args:
        hidden_dropout_prob: share of the result that is dropped in training.
        activation: ``"gelu"`` or ``"relu"``; or any function of a tensor.
        use_normal_initialization: weights begin normally distributed; else as those of `nn.Linear`.
        fp32_residual_addition: that sum is float32 where the layer has 16 bits.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: Activation = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        **kwargs: Any,
    ):
        super().__init__()
        given = {**kwargs, "fp32_residual_addition": fp32_residual_addition}
        self.options = LayerOptions.of(given, f"smp.nn.{type(self).__name__}")
        if not callable(activation) and activation not in _ACTIVATIONS:
            raise UsageError(f"activation is {activation!r}, but it is one of {', '.join(_ACTIVATIONS)}.")
        self.add_residual = post_layernorm if self.options.add_residual is None else self.options.add_residual
        std = initializer_range if use_normal_initialization else None
        first = FirstWeights(std=std, zero=self.options.zero_init)
        self.dense1 = DistributedLinear(hidden_size, intermediate_size, cut="output", first=first)
        self.dense2 = DistributedLinear(intermediate_size, hidden_size, cut="input", first=first)
        self.activation = activation
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if post_layernorm else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps (N, S, H) to (N, S, H)."""
        normalised = hidden_states if self.pre_layernorm is None else self.pre_layernorm(hidden_states)
        activate = _ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        result = activate(self.dense1(normalised.to(self.dense1.weight.dtype)))
        result = self.dropout(self.dense2(result))
        if self.add_residual:
            result = sum_with_residual(result, hidden_states, in_fp32=self.options.fp32_residual_addition)
        return result if self.layernorm is None else self.layernorm(result)
