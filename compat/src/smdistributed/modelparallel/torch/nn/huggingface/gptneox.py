"""GPT-NeoX: its layers, and the names of its states."""

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.nn.distributed.options import Rotary
from smdistributed.modelparallel.torch.nn.huggingface.decoder_arguments import decoder_arguments
from smdistributed.modelparallel.torch.nn.huggingface.family import Family
from smdistributed.modelparallel.torch.nn.huggingface.names import translators
from smdistributed.modelparallel.torch.nn.huggingface.parts import linear, norm


def _rotary(config: Any) -> Mapping[str, Any]:
    """Settings of the positions; older configs have them one by one."""
    found: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    if found is not None:
        return found
    return {
        "rope_type": "default" if getattr(config, "rope_scaling", None) is None else "scaled",
        "rope_theta": float(config.rotary_emb_base),
        "partial_rotary_factor": config.rotary_pct,
    }


def _arguments(config: Any, layer: Any, index: int) -> Mapping[str, Any]:
    rotary = _rotary(config)
    bias = getattr(config, "attention_bias", True)
    common = decoder_arguments(
        config,
        layer,
        index,
        intermediate_size=config.intermediate_size,
        dropouts=(getattr(config, "attention_dropout", 0.0), getattr(config, "hidden_dropout", 0.0)),
        epsilon=config.layer_norm_eps,
    )
    return {
        **common,
        "add_residual": True,
        "parallel_halves": config.use_parallel_residual,
        "query_key_value_bias": bias,
        "dense_bias": bias,
        "fused_query_key_value": True,
        "rotary": Rotary(
            int(common["attention_head_size"] * rotary.get("partial_rotary_factor", 1.0)),
            interleaved=False,
            base=rotary["rope_theta"],
        ),
    }


def _beyond(config: Any) -> str:
    kind = _rotary(config)["rope_type"]
    return "" if kind == "default" else f"rope_type={kind!r}"


FAMILY = Family(
    name="GPT-NeoX",
    containers=("GPTNeoXModel",),
    attribute="layers",
    path="layers",
    # The number of heads, by which query, key and value lie in their linear layer, is in no state.
    parts=(
        *norm("input_layernorm", "attention.pre_layernorm"),
        *norm("post_attention_layernorm", "output.pre_layernorm"),
        *linear("attention.query_key_value", "attention.query_key_value"),
        *linear("attention.dense", "attention.dense"),
        *linear("mlp.dense_h_to_4h", "output.dense1"),
        *linear("mlp.dense_4h_to_h", "output.dense2"),
    ),
    arguments=_arguments,
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    beyond=_beyond,
)

translate_state_dict_to_hf_gptneox, translate_hf_state_dict_to_smdistributed_gptneox = translators(FAMILY)

translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneox
