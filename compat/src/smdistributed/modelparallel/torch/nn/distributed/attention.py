"""``smp.nn.DistributedAttentionLayer``.

Shapes: N samples, S positions, T positions of keys, H hidden channels, A heads, D channels of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.attention.blockwise import Seen
from shardwright.torch.attention.hugging_face import PLAIN, Choices
from shardwright.torch.attention.kernels import Attention, Choice, attend
from smdistributed.modelparallel.torch.nn.distributed.base import DistributedModule, named_inputs
from smdistributed.modelparallel.torch.nn.distributed.first_weights import FirstWeights
from smdistributed.modelparallel.torch.nn.distributed.layer_norm import DistributedLayerNorm
from smdistributed.modelparallel.torch.nn.distributed.linear import DistributedLinear
from smdistributed.modelparallel.torch.nn.distributed.options import LayerOptions
from smdistributed.modelparallel.torch.nn.distributed.precision import at_least_32_bits, sum_with_residual
from smdistributed.modelparallel.torch.nn.distributed.rotary import turned
from smdistributed.modelparallel.torch.nn.flash_attention import alibi_slopes


class DistributedAttentionLayer(DistributedModule):
    """The attention of a transformer layer; each rank has some heads.

    Args:
        attention_dropout_prob: share of attention weights that are dropped in training.
        use_normal_initialization: weights begin normally distributed; else as those of `nn.Linear`.
        cross_attention: keys and values come from other states than queries.
        causal_mask_size: a position sees itself and those before it; any number, the longest sequence in the
            original. None: it sees all.
    """

    inputs = (("hidden_states", "attention_mask"), ("hidden_states", "cross_states", "attention_mask"))

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **kwargs: Any,
    ):
        super().__init__()
        options = self.options = LayerOptions.of(kwargs, f"smp.nn.{type(self).__name__}")
        self.num_attention_heads, self.attention_head_size = num_attention_heads, attention_head_size
        self.hidden_size = hidden_size
        self.cross_attention, self.causal_mask_size = cross_attention, causal_mask_size
        if options.attention_window is not None and causal_mask_size is None:
            raise UsageError("attention_window needs causal_mask_size: a window ends at its own position.")
        self.add_residual = post_layernorm if options.add_residual is None else options.add_residual
        std = initializer_range if use_normal_initialization else None
        self._add_linear_layers(FirstWeights(std=std, zero=options.zero_init))
        self.dropout1 = nn.Dropout(attention_dropout_prob)
        self.dropout2 = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if post_layernorm else None

    def _add_linear_layers(self, first: FirstWeights) -> None:
        hidden, head, options = self.hidden_size, self.attention_head_size, self.options
        of_heads = self.num_attention_heads * head
        common: dict[str, Any] = {"bias": options.query_key_value_bias, "cut": "output", "first": first}
        if options.fused_query_key_value:
            self.query_key_value = DistributedLinear(hidden, 3 * of_heads, block=3 * head, **common)
        else:
            self.query = DistributedLinear(hidden, of_heads, block=head, **common)
            self.key = DistributedLinear(hidden, of_heads, block=head, **common)
            self.value = DistributedLinear(hidden, of_heads, block=head, **common)
        self.dense = DistributedLinear(
            of_heads, hidden, bias=options.dense_bias, cut="input", block=head, first=first
        )

    def forward(self, *inputs: Any) -> Tensor:
        """Attends.

        Args:
            inputs: ``(hidden_states, attention_mask)``, or with `cross_attention`
                ``(hidden_states, cross_states, attention_mask)``, as one tuple. States are (N, S, H) and
                (N, T, H); the mask is added to scores, of a shape that extends to (N, A, S, T), usually
                (N, 1, 1, T); or booleans, True where a position takes part; None for none. Positions
                (N or 1, S) of hidden states that are turned by them may come last.
        """
        names = ("hidden_states", *(("cross_states",) if self.cross_attention else ()), "attention_mask")
        given = named_inputs(self, inputs, (*names, "position_ids"))
        hidden, mask = given["hidden_states"], given["attention_mask"]
        normalised = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        query, key, value = self._heads(normalised, given.get("cross_states"), given["position_ids"])
        context = self._attend(query, key, value, mask).transpose(1, 2)
        context = context.reshape(*hidden.shape[:2], self.num_attention_heads * self.attention_head_size)
        result: Tensor = self.dropout2(self.dense(context.to(self.dense.weight.dtype)))
        if self.add_residual:
            result = sum_with_residual(result, hidden, in_fp32=self.options.fp32_residual_addition)
        if self.layernorm is not None:
            result = self.layernorm(result)
        return result

    def _heads(
        self, hidden: Tensor, cross_states: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (N, A, S or T, D) each."""
        dtype = self.dense.weight.dtype
        shape = (self.num_attention_heads, self.attention_head_size)
        if self.options.fused_query_key_value:
            fused = self.query_key_value(hidden.to(dtype)).unflatten(-1, (shape[0], 3 * shape[1]))
            query_NSAD, key_NSAD, value_NSAD = fused.chunk(3, dim=-1)
        else:
            hidden = hidden.to(dtype)
            other = hidden if cross_states is None else cross_states.to(dtype)
            query_NSAD = self.query(hidden).unflatten(-1, shape)
            key_NSAD = self.key(other).unflatten(-1, shape)
            value_NSAD = self.value(other).unflatten(-1, shape)
        if self.options.rotary is not None:
            query_NSAD, key_NSAD = turned(query_NSAD, key_NSAD, positions, self.options.rotary)
        return query_NSAD.transpose(1, 2), key_NSAD.transpose(1, 2), value_NSAD.transpose(1, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """(N, A, S, D)."""
        options = self.options
        if options.attention_in_fp32:
            query, key, value = (at_least_32_bits(each) for each in (query, key, value))
        causal = self.causal_mask_size is not None and not self.cross_attention
        attention = Attention(
            scale=self._factor(),
            seen=Seen(causal=causal, window=options.attention_window),
            dropout=self.dropout1.p if self.training else 0.0,
            hidden_score=torch.finfo(query.dtype).min,
        )
        bias = self._bias(query, key, mask)
        wanted = None if options.flash_attention else PLAIN
        result, choice = attend(query, key, value, bias, attention, wanted=wanted)
        because = options.plain_because
        Choices.note(self, choice if wanted is None or because is None else Choice(*because))
        return result

    def _factor(self) -> float:
        """The factor of the scores."""
        factor = 1 / math.sqrt(self.attention_head_size) if self.options.scale_attention_scores else 1.0
        if self.options.scale_attn_by_layer_idx and self.options.layer_idx is not None:
            factor /= self.options.layer_idx + 1
        return factor

    def _bias(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """What is added to the scores; None for nothing."""
        if not self.options.use_alibi or self.cross_attention:
            return mask
        slopes = alibi_slopes(self.num_attention_heads, self.options.alibi_bias_max)
        slopes_A = torch.tensor(slopes, dtype=query.dtype, device=query.device)
        rows = torch.arange(query.shape[2], device=query.device)
        distances = (torch.arange(key.shape[2], device=query.device)[None] - rows[:, None]).abs()
        bias = -distances.to(query.dtype) * slopes_A[:, None, None]
        if mask is None:
            return bias[None]
        if mask.dtype is torch.bool:
            return bias.masked_fill(~mask, torch.finfo(query.dtype).min)
        return bias + mask

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"heads={self.num_attention_heads}, head_size={self.attention_head_size}"
