"""The names of the states of GPT-NeoX."""

from smdistributed.modelparallel.torch.nn.huggingface.names import translators

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneox",
    "translate_state_dict_to_hf_gptneox",
]

translate_state_dict_to_hf_gptneox, translate_hf_state_dict_to_smdistributed_gptneox = translators(
    "GPT-NeoX", masks=("attention.bias",)
)
