"""The names of the states of GPT-J."""

from smdistributed.modelparallel.torch.nn.huggingface.names import translators

__all__ = [
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]

translate_state_dict_to_hf_gptj, translate_hf_state_dict_to_smdistributed_gptj = translators(
    "GPT-J", masks=("attn.bias",)
)

# As older releases spelled it.
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
