"""RoBERTa: its layers, and the names of its states."""

from smdistributed.modelparallel.torch.nn.huggingface.bert_layers import family_of_encoders
from smdistributed.modelparallel.torch.nn.huggingface.names import translators

FAMILY = family_of_encoders("RoBERTa", "RobertaEncoder")

translate_state_dict_to_hf_roberta, translate_hf_state_dict_to_smdistributed_roberta = translators(FAMILY)

# As older releases spelled it.
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
