"""BERT: its layers, and the names of its states."""

from smdistributed.modelparallel.torch.nn.huggingface.bert_layers import family_of_encoders
from smdistributed.modelparallel.torch.nn.huggingface.names import translators

FAMILY = family_of_encoders("BERT", "BertEncoder")

translate_state_dict_to_hf_bert, translate_hf_state_dict_to_smdistributed_bert = translators(FAMILY)

# As older releases spelled it.
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
