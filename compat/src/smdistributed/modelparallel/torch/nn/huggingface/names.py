"""Translating states between a distributed model and Hugging Face's.

::

    transformer.h.0.attn.c_proj.weight    ◄─►    transformer.seq_layers.0.attention.dense.weight
    transformer.wte.weight                ◄─►    transformer.wte.weight

Only layers have other names. A state that is under the wanted names already is given back as it is.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.nn.huggingface.family import Family
from smdistributed.modelparallel.torch.nn.huggingface.parts import to_hugging_face, to_smdistributed

Translate = Callable[..., Mapping[str, Any]]
Translators = tuple[Translate, Translate]
"""From a distributed model to Hugging Face's names, and back."""

SEQ_LAYERS = "seq_layers"


def translators(family: Family) -> Translators:
    """Translators for a family of models."""

    def to_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
        """The state of a distributed model under Hugging Face's names.

        Args:
            max_seq_len: positions that masks are made for, where the state has masks.

        Raises:
            UsageError: it is none of such a model, or the number of positions is none.
        """
        _check(state_dict, family.name, max_seq_len)
        state = state_dict
        if _has_layers(state, _ours(family)):
            state = _by_layer(state, family, _ours(family), _theirs(family), to_hugging_face)
        return state if max_seq_len is None else _with_masks_for(state, family.buffers, max_seq_len)

    def to_smp(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
        """The state of a Hugging Face model under the names of the distributed one.

        Args:
            max_seq_len: accepted: distributed layers have no masks that are as long.

        Raises:
            UsageError: it is none of such a model, or the number of positions is none.
        """
        _check(state_dict, family.name, max_seq_len)
        if not _has_layers(state_dict, _theirs(family)):
            return state_dict
        return _by_layer(state_dict, family, _theirs(family), _ours(family), to_smdistributed)

    return to_hf, to_smp


def block_translators(family: Family) -> Translators:
    """Translators for a model whose layers are distributed one by one, and keep their place."""

    def to_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
        """The state under Hugging Face's names; see `translators`."""
        _check(state_dict, family.name, max_seq_len)
        return _by_layer(state_dict, family, family.path, family.path, to_hugging_face)

    def to_smp(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> Mapping[str, Any]:
        """The state of a Hugging Face model under our names; see `translators`."""
        _check(state_dict, family.name, max_seq_len)
        return _by_layer(state_dict, family, family.path, family.path, to_smdistributed)

    return to_hf, to_smp


def _theirs(family: Family) -> str:
    return family.path


def _ours(family: Family) -> str:
    return ".".join([*family.path.split(".")[:-1], SEQ_LAYERS])


def _check(state: Any, name: str, max_seq_len: Any) -> None:
    if not isinstance(state, Mapping):
        raise UsageError(f"the state of a {name} is a dictionary, not a {type(state).__name__}.")
    if max_seq_len is None:
        return
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 1:
        raise UsageError(f"max_seq_len is {max_seq_len!r}, but it is a number of positions, at least 1.")


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<around>(?:.*\.)?){re.escape(path)}\.(?P<number>\d+)\.(?P<name>.+)")


def _has_layers(state: Mapping[str, Any], path: str) -> bool:
    pattern = _pattern(path)
    return any(pattern.fullmatch(str(name)) for name in state)


def _by_layer(
    state: Mapping[str, Any], family: Family, source: str, target: str, translate: Callable[..., Any]
) -> Mapping[str, Any]:
    """A state with each layer translated, where its first name stands."""
    pattern = _pattern(source)
    layers: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, value in state.items():
        found = pattern.fullmatch(str(name))
        if found is not None and found["name"] not in family.buffers:
            layers.setdefault((found["around"], found["number"]), {})[found["name"]] = value
    result: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        found = pattern.fullmatch(str(name))
        if found is None:
            result[name] = value
            continue
        around, number = found["around"], found["number"]
        layer = layers.pop((around, number), {})
        for inner, tensor in translate(layer, family.parts, f"{around}{source}.{number}.").items():
            result[f"{around}{target}.{number}.{inner}"] = tensor.contiguous()
    return result


def _with_masks_for(state: Mapping[str, Any], masks: tuple[str, ...], length: int) -> Mapping[str, Any]:
    """The same, with masks that are made for a number of positions; nothing else depends on it."""
    found = {
        name: made
        for name, value in state.items()
        if isinstance(value, Tensor)
        and name.endswith(tuple(f".{mask}" for mask in masks))
        and (made := _mask_for(value, length)) is not None
    }
    if not found:
        return state
    changed: OrderedDict[str, Any] = OrderedDict(state)
    changed.update(found)
    return changed


def _mask_for(mask: Tensor, length: int) -> Tensor | None:
    """Another mask of this kind; None where it stays."""
    now = mask.shape[-1] if mask.dim() else length
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
