"""Translating the names of a state between a distributed model and Hugging Face's.

With tensor_parallel_degree 1 models stay Hugging Face's own, so a state under its names is what both sides
have. A state of a distributed model (names with ``seq_layers``) comes from a run of SageMaker's own library
with tensor parallelism.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.exceptions import NotThereYetError

__all__ = ["Translators", "hugging_face_names", "translators", "translators_of"]

Translate = Callable[..., Mapping[str, Any]]
Translators = tuple[Translate, Translate]
"""From a model of this library to Hugging Face's names, and back."""

_MARK = "seq_layers"
_MODULES = {
    "GPT2": "gpt2",
    "GPTJ": "gptj",
    "GPTNeoX": "gptneox",
    "GPTNeo": "gptneo",
    "Bert": "bert",
    "Roberta": "roberta",
}


def translators(model: str, *, masks: tuple[str, ...]) -> Translators:
    """Translators for a family of models: one function twice, as long as both sides have the same names.

    Args:
        model: its name, for errors.
        masks: ends of the names of masks and numbers of positions.
    """

    def translate(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
        return hugging_face_names(state_dict, model=model, masks=masks, max_seq_len=max_seq_len)

    return translate, translate


def hugging_face_names(
    state_dict: Mapping[str, Any], *, model: str, masks: tuple[str, ...] = (), max_seq_len: int | None = None
) -> Mapping[str, Any]:
    """A state under Hugging Face's names, which is given back as it is.

    Args:
        state_dict: of a model of this library, or of Hugging Face's.
        model: its name, for errors.
        masks: ends of the names of masks and numbers of positions.
        max_seq_len: positions that these are made for; None for those that they have.

    Raises:
        NotThereYetError: the state is that of a distributed model.
        UsageError: it is none, or the number of positions is none.
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"the state of a {model} is a dictionary, not a {type(state_dict).__name__}.")
    distributed = [name for name in state_dict if _MARK in str(name).split(".")]
    if distributed:
        raise NotThereYetError(
            f"{len(distributed)} of the {len(state_dict)} names in this state are those of a distributed "
            f"{model} (for example {distributed[0]}), which a run with tensor parallelism has made; that is "
            "not there yet. Translate it to Hugging Face's names where it was made "
            "(smp.save_checkpoint with partial=False does), and load that."
        )
    if max_seq_len is None:
        return state_dict
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 1:
        raise UsageError(f"max_seq_len is {max_seq_len!r}, but it is a number of positions, at least 1.")
    return _with_masks_for(state_dict, masks, max_seq_len)


def _with_masks_for(state_dict: Mapping[str, Any], masks: tuple[str, ...], length: int) -> Mapping[str, Any]:
    """The same, with masks that are made for a number of positions; nothing else depends on it."""
    found = {
        name: made
        for name, value in state_dict.items()
        if isinstance(value, Tensor)
        and name.endswith(masks)
        and (made := _mask_for(value, length)) is not None
    }
    if not found:
        return state_dict
    changed: OrderedDict[str, Any] = OrderedDict(state_dict)
    changed.update(found)
    return changed


def _mask_for(mask: Tensor, length: int) -> Tensor | None:
    """Another mask of this kind; None where it stays."""
    now = mask.shape[-1]
    if now == length:
        return None
    if mask.dim() == 2 and torch.equal(mask[0], torch.arange(now, device=mask.device)):  # position_ids
        return torch.arange(length, device=mask.device, dtype=mask.dtype).expand(1, -1)
    if mask.dim() != 4:
        return None
    if length < now:
        return mask[:, :, :length, :length].clone()
    is_causal = torch.equal(mask[0, 0] != 0, mask.new_ones(now, now).tril() != 0)
    return mask.new_ones(length, length).tril()[None, None] if is_causal else None


def translators_of(model: nn.Module) -> list[Translators]:
    """Translators for a Hugging Face model; none for any other.

    Args:
        model: the user's module.
    """
    for kind in type(model).__mro__:
        if not kind.__module__.startswith("transformers."):
            continue
        # The longest name first: GPTNeoX begins like GPTNeo.
        for prefix in sorted(_MODULES, key=len, reverse=True):
            if kind.__name__.startswith(prefix):
                name = _MODULES[prefix]
                module = import_module(f"{__package__}.{name}")
                return [
                    (
                        getattr(module, f"translate_state_dict_to_hf_{name}"),
                        getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}"),
                    )
                ]
    return []
