"""``smp.nn.DistributedTransformer``."""

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule
from smdistributed.modelparallel.torch.nn.distributed.layer import DistributedTransformerLayer
from smdistributed.modelparallel.torch.nn.distributed.output import Activation


class DistributedTransformer(DistributedModule):
    """A stack of transformer layers."""

    inputs = DistributedTransformerLayer.inputs

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: Activation = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **kwargs: Any,
    ):
        super().__init__()
        self.seq_layers = nn.Sequential(
            *(
                DistributedTransformerLayer(
                    num_attention_heads=num_attention_heads,
                    attention_head_size=attention_head_size,
                    hidden_size=hidden_size,
                    intermediate_size=intermediate_size,
                    attention_dropout_prob=attention_dropout_prob,
                    hidden_dropout_prob=hidden_dropout_prob,
                    activation=activation,
                    layernorm_epsilon=layernorm_epsilon,
                    initializer_range=initializer_range,
                    use_normal_initialization=use_normal_initialization,
                    causal_mask_size=causal_mask_size,
                    add_cross_attention=add_cross_attention,
                    pre_layernorm=pre_layernorm,
                    post_layernorm=post_layernorm,
                    **{"layer_idx": index, **kwargs},
                )
                for index in range(num_layers)
            )
        )

    def forward(self, *inputs: Any) -> Any:
        """Runs the layers, one after the other; see `DistributedTransformerLayer`."""
        return self.seq_layers(inputs[0] if len(inputs) == 1 else inputs)
