"""The names of the states of GPT-Neo."""

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.names import hugging_face_names

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
]

_MODEL = "GPT-Neo"
_MASKS = ("attn.attention.bias",)


def translate_state_dict_to_hf_gptneo(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """The state of a GPT-Neo model under Hugging Face's names; see `hugging_face_names`."""
    return hugging_face_names(state_dict, model=_MODEL, masks=_MASKS, max_seq_len=max_seq_len)


def translate_hf_state_dict_to_smdistributed_gptneo(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """The state for a GPT-Neo model of this library, from Hugging Face's; see `hugging_face_names`."""
    return hugging_face_names(state_dict, model=_MODEL, masks=_MASKS, max_seq_len=max_seq_len)
