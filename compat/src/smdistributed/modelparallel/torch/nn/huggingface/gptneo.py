"""GPT-Neo: its layers, and the names of its states."""

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.decoder_arguments import decoder_arguments
from smdistributed.modelparallel.torch.nn.huggingface.family import Family
from smdistributed.modelparallel.torch.nn.huggingface.names import translators
from smdistributed.modelparallel.torch.nn.huggingface.parts import linear, norm


def _arguments(config: Any, layer: Any, index: int) -> Mapping[str, Any]:
    is_local = config.attention_layers[index] == "local"
    common = decoder_arguments(
        config,
        layer,
        index,
        intermediate_size=config.intermediate_size,
        dropouts=(config.attention_dropout, config.resid_dropout),
        epsilon=config.layer_norm_epsilon,
    )
    return {
        **common,
        "add_residual": True,
        "query_key_value_bias": False,
        "scale_attention_scores": False,
        "attention_in_fp32": True,
        "attention_window": config.window_size if is_local else None,
    }


FAMILY = Family(
    name="GPT-Neo",
    containers=("GPTNeoModel",),
    attribute="h",
    path="h",
    parts=(
        *norm("ln_1", "attention.pre_layernorm"),
        *linear("attn.attention.k_proj", "attention.key", bias=False),
        *linear("attn.attention.v_proj", "attention.value", bias=False),
        *linear("attn.attention.q_proj", "attention.query", bias=False),
        *linear("attn.attention.out_proj", "attention.dense"),
        *norm("ln_2", "output.pre_layernorm"),
        *linear("mlp.c_fc", "output.dense1"),
        *linear("mlp.c_proj", "output.dense2"),
    ),
    arguments=_arguments,
    buffers=("attn.attention.bias", "attn.attention.masked_bias"),
)

translate_state_dict_to_hf_gptneo, translate_hf_state_dict_to_smdistributed_gptneo = translators(FAMILY)

translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
