"""The names of the states of BERT."""

from smdistributed.modelparallel.torch.nn.huggingface.names import translators

__all__ = [
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
    "translate_state_dict_to_smdistributed",
]

translate_state_dict_to_hf_bert, translate_hf_state_dict_to_smdistributed_bert = translators(
    "BERT", masks=("embeddings.position_ids",)
)

# As older releases spelled it.
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
