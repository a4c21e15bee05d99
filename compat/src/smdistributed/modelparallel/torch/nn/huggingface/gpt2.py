"""GPT-2: its layers, and the names of its states."""

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.decoder_arguments import decoder_arguments
from smdistributed.modelparallel.torch.nn.huggingface.family import Family
from smdistributed.modelparallel.torch.nn.huggingface.layer_hooks import hooks_of_layers
from smdistributed.modelparallel.torch.nn.huggingface.names import block_translators, translators
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
        "add_cross_attention": config.add_cross_attention,
        "add_residual": True,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


_THREE = ("attention.query", "attention.key", "attention.value")

FAMILY = Family(
    name="GPT-2",
    containers=("GPT2Model",),
    attribute="h",
    path="h",
    parts=(
        *norm("ln_1", "attention.pre_layernorm"),
        *linear("attn.c_attn", *_THREE, transposed=True),
        *linear("attn.c_proj", "attention.dense", transposed=True),
        *norm("ln_cross_attn", "cross_attention.pre_layernorm"),
        *linear("crossattention.q_attn", "cross_attention.query", transposed=True),
        *linear("crossattention.c_attn", "cross_attention.key", "cross_attention.value", transposed=True),
        *linear("crossattention.c_proj", "cross_attention.dense", transposed=True),
        *norm("ln_2", "output.pre_layernorm"),
        *linear("mlp.c_fc", "output.dense1", transposed=True),
        *linear("mlp.c_proj", "output.dense2", transposed=True),
    ),
    arguments=_arguments,
    buffers=("attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias"),
)

translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2 = translators(FAMILY)

translate_layer_state_dict_to_hf_gpt2_block, translate_hf_block_state_dict_to_smdistributed = (
    block_translators(FAMILY)
)


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Any, Any, Any]:
    """Hooks that register `smp.nn.DistributedTransformerLayer` for ``GPT2Block``."""
    return hooks_of_layers(FAMILY, lambda block: (block.attn.config, block.attn.layer_idx))


# As older releases spelled it.
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
