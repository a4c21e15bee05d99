"""The names of the states of GPT-NeoX."""

from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.names import hugging_face_names

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneox",
    "translate_state_dict_to_hf_gptneox",
]

_MODEL = "GPT-NeoX"
_MASKS = ("attention.bias",)


def translate_state_dict_to_hf_gptneox(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """The state of a GPT-NeoX model under Hugging Face's names; see `hugging_face_names`."""
    return hugging_face_names(state_dict, model=_MODEL, masks=_MASKS, max_seq_len=max_seq_len)


def translate_hf_state_dict_to_smdistributed_gptneox(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """The state for a GPT-NeoX model of this library, from Hugging Face's; see `hugging_face_names`."""
    return hugging_face_names(state_dict, model=_MODEL, masks=_MASKS, max_seq_len=max_seq_len)
