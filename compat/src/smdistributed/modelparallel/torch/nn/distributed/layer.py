"""``smp.nn.DistributedTransformerLayer``."""

from typing import Any

from torch import Tensor

from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.nn.distributed.attention import DistributedAttentionLayer
from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule, as_given, named_inputs
from smdistributed.modelparallel.torch.nn.distributed.layer_norm import DistributedLayerNorm
from smdistributed.modelparallel.torch.nn.distributed.options import LayerOptions
from smdistributed.modelparallel.torch.nn.distributed.output import (
    Activation,
    DistributedTransformerOutputLayer,
)


class DistributedTransformerLayer(DistributedModule):
    """A transformer layer.

    ::

        hidden ─► attention ─► [cross_attention] ─► output ─►
        hidden ─► [pre_layernorm] ┬► attention ─┐
                                  └► output ────┴► + hidden ─►      with `parallel_halves`

    Args:
        attention_dropout_prob: share of attention weights that are dropped in training.
        hidden_dropout_prob: share of the results of both halves that is.
        activation: ``"gelu"`` or ``"relu"``; or any function of a tensor.
        use_normal_initialization: weights begin normally distributed; else as those of `nn.Linear`.
        causal_mask_size: a position sees itself and those before it; None: it sees all.
    """

    inputs = (
        ("hidden_states", "attention_mask"),
        ("hidden_states", "cross_states", "attention_mask", "cross_mask"),
    )

    def __init__(
        self,
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
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        **kwargs: Any,
    ):
        super().__init__()
        given = {**kwargs, "use_alibi": use_alibi, "alibi_bias_max": alibi_bias_max}
        self.options = LayerOptions.of(given, f"smp.nn.{type(self).__name__}")
        if not pre_layernorm and not post_layernorm:
            raise UsageError("pre_layernorm and post_layernorm are False, but one of them must be True.")
        shared = self.options.parallel_halves and self.options.shared_layernorm
        common: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm and not shared,
            "post_layernorm": post_layernorm,
            **given,
        }
        if self.options.parallel_halves:
            common["add_residual"] = False
        of_attention = common | {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
            "causal_mask_size": causal_mask_size,
        }
        if shared:
            self.pre_layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon)
        self.attention = DistributedAttentionLayer(**of_attention)
        self.add_cross_attention = add_cross_attention
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(cross_attention=True, **of_attention)
        self.output = DistributedTransformerOutputLayer(
            intermediate_size=intermediate_size, activation=activation, **common
        )

    def forward(self, *inputs: Any) -> Any:
        """Runs the layer.

        Args:
            inputs: ``(hidden_states, attention_mask)``, or with `add_cross_attention` ``(hidden_states,
                cross_states, attention_mask, cross_mask)``, as one tuple. See `DistributedAttentionLayer` for
                the shapes. Without cross states, that attention is passed over.
        """
        others = ("cross_states", "attention_mask", "cross_mask")
        names = others if self.add_cross_attention else ("attention_mask",)
        given = named_inputs(self, inputs, ("hidden_states", *names, "position_ids"))
        hidden, mask, positions = (
            given[name] for name in ("hidden_states", "attention_mask", "position_ids")
        )
        if self.options.parallel_halves:
            return as_given(self._in_parallel(hidden, mask, positions), inputs)
        result = self.attention((hidden, mask, positions))
        if given.get("cross_states") is not None:
            result = self.cross_attention((result, given["cross_states"], given["cross_mask"]))
        return as_given(self.output(result), inputs)

    def _in_parallel(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        normalised = self.pre_layernorm(hidden) if self.options.shared_layernorm else hidden
        result: Tensor = self.attention((normalised, mask, positions)) + self.output(normalised)
        return result + hidden
