"""The names of the states of GPT-2."""

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.names import hugging_face_names

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_state_dict_to_hf_gpt2",
]

_MODEL = "GPT-2"
_MASKS = ("attn.bias",)


def translate_state_dict_to_hf_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """The state of a GPT-2 model under Hugging Face's names; see `hugging_face_names`."""
    return hugging_face_names(state_dict, model=_MODEL, masks=_MASKS, max_seq_len=max_seq_len)


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """The state for a GPT-2 model of this library, from Hugging Face's; see `hugging_face_names`."""
    return hugging_face_names(state_dict, model=_MODEL, masks=_MASKS, max_seq_len=max_seq_len)


# As older releases spelled it.
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
