"""The names of the states of GPT-2."""

from smdistributed.modelparallel.torch.nn.huggingface.names import translators

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]

translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2 = translators(
    "GPT-2", masks=("attn.bias",)
)

# As older releases spelled it.
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
