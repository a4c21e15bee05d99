"""The layers that BERT and RoBERTa have in common."""

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.family import Family
from smdistributed.modelparallel.torch.nn.huggingface.parts import linear, norm


def _arguments(config: Any, layer: Any, index: int) -> Mapping[str, Any]:
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": layer.intermediate.intermediate_act_fn,
        "layernorm_epsilon": config.layer_norm_eps,
        "causal_mask_size": config.max_position_embeddings if config.is_decoder else None,
        "add_cross_attention": config.add_cross_attention,
        "pre_layernorm": False,
        "post_layernorm": True,
        "layer_idx": index,
    }


def _beyond(config: Any) -> str:
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    return "" if kind == "absolute" else f"position_embedding_type={kind!r}"


def _attention(theirs: str, ours: str) -> tuple[Any, ...]:
    return (
        *linear(f"{theirs}.self.query", f"{ours}.query"),
        *linear(f"{theirs}.self.key", f"{ours}.key"),
        *linear(f"{theirs}.self.value", f"{ours}.value"),
        *linear(f"{theirs}.output.dense", f"{ours}.dense"),
        *norm(f"{theirs}.output.LayerNorm", f"{ours}.layernorm"),
    )


def family_of_encoders(name: str, container: str) -> Family:
    """The family with these layers."""
    return Family(
        name=name,
        containers=(container,),
        attribute="layer",
        path="encoder.layer",
        parts=(
            *_attention("attention", "attention"),
            *_attention("crossattention", "cross_attention"),
            *linear("intermediate.dense", "output.dense1"),
            *linear("output.dense", "output.dense2"),
            *norm("output.LayerNorm", "output.layernorm"),
        ),
        arguments=_arguments,
        buffers=("embeddings.position_ids",),
        beyond=_beyond,
    )
