"""What the layers of all decoders have in common, as arguments of `DistributedTransformerLayer`."""

from typing import Any


def decoder_arguments(
    config: Any,
    layer: Any,
    index: int,
    *,
    intermediate_size: int | None,
    dropouts: tuple[float, float],
    epsilon: float,
) -> dict[str, Any]:
    """The arguments that follow from a configuration by the names that all of them answer to."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    of_attention, of_results = dropouts
    return {
        "num_attention_heads": heads,
        "attention_head_size": hidden // heads,
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or 4 * hidden,
        "attention_dropout_prob": float(of_attention),
        "hidden_dropout_prob": float(of_results),
        "activation": layer.mlp.act,
        "layernorm_epsilon": epsilon,
        "causal_mask_size": config.max_position_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
        "layer_idx": index,
    }
