"""The names of the states of GPT-Neo."""

from smdistributed.modelparallel.torch.nn.huggingface.names import translators

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]

translate_state_dict_to_hf_gptneo, translate_hf_state_dict_to_smdistributed_gptneo = translators(
    "GPT-Neo", masks=("attn.attention.bias",)
)
