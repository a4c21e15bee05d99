"""Options of transformer layers beyond their documented arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from shardwright.errors import UsageError


@dataclass(frozen=True, slots=True)
class Rotary:
    """Positions that turn queries and keys ("RoFormer", Su et al., 2021).

    Attributes:
        num_channels: of each head, from the first, that are turned.
        interleaved: pairs are neighbours (GPT-J); else the first half goes with the second (GPT-NeoX).
    """

    num_channels: int
    interleaved: bool
    base: float = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """How a layer computes.

    Attributes:
        attention_in_fp32: scores and what follows from them are float32 where the layer has 16 bits.
        query_key_layer_scaling: scores cannot overflow in 16 bits: they are float32 inside of every kernel.
        fused_softmax, fused_dropout, fused_bias_gelu: PyTorch's kernels are taken anyway; same results.
        flash_attention: kernels that keep no scores; else plain attention.
        use_alibi: scores fall with the distance ("Train Short, Test Long", Press et al., 2022).
        fp32_residual_addition: what goes from layer to layer is float32 where these have 16 bits.
        zero_init: weights begin as zeros, for scripts that load others.
        scale_attention_scores: divide scores by the root of the head size.
        scale_attn_by_layer_idx: divide them by ``layer_idx + 1`` as well.
        add_residual: add what a layer's half was given to what it computes; None: where `post_layernorm` is
            True, as the documented reference does.
        attention_window: with a causal mask, a position sees so many, of which it is the last; None for all.
        rotary: positions that turn queries and keys; None for none.
        query_key_value_bias, dense_bias: whether these linear layers of the attention have biases.
        fused_query_key_value: one linear layer for all three, head by head.
        parallel_halves: attention and output see the same input, and their results are added to it.
        plain_because: why attention is plain, for the table of kernels; set with `flash_attention` False.
    """

    attention_in_fp32: bool = False
    query_key_layer_scaling: bool = False
    fused_softmax: bool = True
    fused_dropout: bool = False
    fused_bias_gelu: bool = False
    flash_attention: bool = True
    use_alibi: bool = False
    alibi_bias_max: float = 8
    fp32_residual_addition: bool = False
    zero_init: bool = False
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int | None = None
    add_residual: bool | None = None
    attention_window: int | None = None
    rotary: Rotary | None = None
    query_key_value_bias: bool = True
    dense_bias: bool = True
    fused_query_key_value: bool = False
    parallel_halves: bool = False
    shared_layernorm: bool = False
    plain_because: tuple[str, str] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], owner: str) -> Self:
        """The options among the arguments of a module."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise UsageError(
                f"{owner} has no argument {', '.join(unknown)}. Besides those of its documentation it has "
                f"{', '.join(sorted(known))}."
            )
        options = cls(**given)
        if options.scale_attn_by_layer_idx and options.layer_idx is None:
            raise UsageError(f"{owner}: scale_attn_by_layer_idx is True, but layer_idx is not given.")
        return options
