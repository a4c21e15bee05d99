"""Attention without a table of all scores, by PyTorch's own kernels.

Shapes: B samples, S positions, H heads, D channels of a head; queries are (B, H, S, D).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shardwright.errors import UsageError


class FlashAttentionLayer(nn.Module):
    """Attention from queries, keys and values that are packed in one tensor.

    Args:
        attention_dropout_prob: share of attention weights that are dropped in training.
        use_alibi: add a bias that falls with the distance to each score ("Train Short, Test Long", Press et
            al., 2022). As in the original, only with `triton_flash_attention` and a mask.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ):
        super().__init__()
        if not 0.0 <= attention_dropout_prob < 1.0:
            raise UsageError(
                f"attention_dropout_prob is {attention_dropout_prob!r}, but it is a share from 0 to below 1."
            )
        if scale_attn_by_layer_idx and layer_idx is None:
            raise UsageError("scale_attn_by_layer_idx is True, but layer_idx is not given. Pass its number.")
        if use_alibi and not triton_flash_attention:
            raise UsageError("use_alibi needs triton_flash_attention=True, as in SageMaker's library.")
        self.attention_dropout_prob = attention_dropout_prob
        self.attention_head_size = attention_head_size
        self.scale_attention_scores = scale_attention_scores
        self.scale_attn_by_layer_idx = scale_attn_by_layer_idx
        self.layer_idx = layer_idx
        self.scale = scale
        self.triton_flash_attention = triton_flash_attention
        self.use_alibi = use_alibi

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attends.

        Args:
            attn_mask: added to the scores, of a shape that extends to (B, H, S, S); or booleans, True where a
                position takes part.
        """
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise UsageError(f"qkv has the shape {tuple(qkv.shape)}, but it must be (B, S, 3, H, D).")
        if self.attention_head_size not in (None, qkv.shape[-1]):
            raise UsageError(
                f"attention_head_size is {self.attention_head_size}, but heads of qkv have {qkv.shape[-1]}."
            )
        if self.use_alibi and attn_mask is None:
            raise UsageError("use_alibi needs attn_mask, as in SageMaker's library. Pass zeros for none.")
        query_BHSD, key_BHSD, value_BHSD = (part.transpose(1, 2) for part in qkv.unbind(2))
        bias = self._bias(query_BHSD, attn_mask)
        if bias is not None and causal:
            bias = bias + _causal_bias(query_BHSD)
        return scaled_dot_product_attention(
            query_BHSD,
            key_BHSD,
            value_BHSD,
            attn_mask=bias,
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
            is_causal=causal and bias is None,
            scale=self._factor(qkv.shape[-1]),
        )

    def _factor(self, head_size: int) -> float:
        factor = 1.0
        if self.scale is not None:
            factor = self.scale
        elif self.scale_attention_scores:
            factor = 1.0 / math.sqrt(head_size)
        if self.scale_attn_by_layer_idx and self.layer_idx is not None:
            factor /= self.layer_idx + 1
        return factor

    def _bias(self, query: Tensor, attn_mask: Tensor | None) -> Tensor | None:
        """What is added to the scores; None for nothing."""
        bias = attn_mask
        if bias is not None:
            if bias.dtype is torch.bool:
                zeros = torch.zeros_like(bias, dtype=query.dtype)
                bias = zeros.masked_fill(~bias, float("-inf"))
            bias = bias[(None,) * (4 - bias.dim())].to(query.dtype)
        if self.use_alibi and bias is not None:
            bias = bias + _alibi_bias(query)
        return bias

    def extra_repr(self) -> str:
        """The settings that differ from layer to layer."""
        shown: dict[str, Any] = {"dropout": self.attention_dropout_prob, "layer_idx": self.layer_idx}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def alibi_slopes(num_heads: int, bias_max: float = 8) -> list[float]:
    """How fast the bias falls, by head: a geometric sequence, and a second one beyond a power of 2 heads.

    Args:
        bias_max: the last slope of the sequence is 2 to the power of minus this.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-bias_max / 2 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]
    return slopes + between


def _alibi_bias(query: Tensor) -> Tensor:
    """(1, H, S, S): the distance between two positions, times the slope of the head, below zero."""
    num_heads, length = query.shape[1:3]
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=query.dtype, device=query.device)
    positions = torch.arange(length, device=query.device)
    distances = (positions[None, :] - positions[:, None]).abs().to(query.dtype)
    return -distances * slopes[:, None, None]


def _causal_bias(query: Tensor) -> Tensor:
    length = query.shape[2]
    bias = torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device)
    return bias.triu(1)
