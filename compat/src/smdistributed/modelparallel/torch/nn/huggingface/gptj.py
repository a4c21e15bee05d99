"""GPT-J: its layers, and the names of its states."""

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.nn.distributed.options import Rotary
from smdistributed.modelparallel.torch.nn.huggingface.decoder_arguments import decoder_arguments
from smdistributed.modelparallel.torch.nn.huggingface.family import Family
from smdistributed.modelparallel.torch.nn.huggingface.names import translators
from smdistributed.modelparallel.torch.nn.huggingface.parts import linear, norm


def _arguments(config: Any, layer: Any, index: int) -> Mapping[str, Any]:
    common = decoder_arguments(
        config,
        layer,
        index,
        intermediate_size=config.n_inner,
        dropouts=(config.attn_pdrop, config.resid_pdrop),
        epsilon=config.layer_norm_epsilon,
    )
    return {
        **common,
        "parallel_halves": True,
        "shared_layernorm": True,
        "query_key_value_bias": False,
        "dense_bias": False,
        "attention_in_fp32": True,
        "rotary": Rotary(config.rotary_dim or common["attention_head_size"], interleaved=True),
    }


def _beyond(config: Any) -> str:
    # Its table of positions is then as wide as all heads together, and each takes the first angles of it.
    return "" if config.rotary_dim is not None else "rotary_dim=None"


FAMILY = Family(
    name="GPT-J",
    containers=("GPTJModel",),
    attribute="h",
    path="h",
    parts=(
        *norm("ln_1", "pre_layernorm"),
        *linear("attn.k_proj", "attention.key", bias=False),
        *linear("attn.v_proj", "attention.value", bias=False),
        *linear("attn.q_proj", "attention.query", bias=False),
        *linear("attn.out_proj", "attention.dense", bias=False),
        *linear("mlp.fc_in", "output.dense1"),
        *linear("mlp.fc_out", "output.dense2"),
    ),
    arguments=_arguments,
    buffers=("attn.bias", "attn.masked_bias", "attn.embed_positions"),
    beyond=_beyond,
)

translate_state_dict_to_hf_gptj, translate_hf_state_dict_to_smdistributed_gptj = translators(FAMILY)

# As older releases spelled it.
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
