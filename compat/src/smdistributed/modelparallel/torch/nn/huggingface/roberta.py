"""The names of the states of RoBERTa."""

from smdistributed.modelparallel.torch.nn.huggingface.names import translators

__all__ = [
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]

translate_state_dict_to_hf_roberta, translate_hf_state_dict_to_smdistributed_roberta = translators(
    "RoBERTa", masks=("embeddings.position_ids",)
)

# As older releases spelled it.
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
