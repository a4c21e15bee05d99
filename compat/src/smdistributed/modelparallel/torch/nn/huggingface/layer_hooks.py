"""Hooks to register distributed layers for the single layers of a Hugging Face model.

::

    smp.set_tensor_parallelism(model.transformer.h, True)
    hooks = get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(GPT2Block, DistributedTransformerLayer, *hooks)

The model calls the layers itself, and they keep their place: ``transformer.h.0.attention.query.weight``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface.family import Family


class LayerInit:
    """The `init_hook` for the layers of a family; layers that exist already are distributed by it, too."""

    def __init__(self, family: Family, place: Callable[[Any], tuple[Any, int]]):
        self.family = family
        self.place = place

    def __call__(self, config: Any, layer_idx: Any = None) -> tuple[tuple[()], Mapping[str, Any]]:
        """The arguments of a distributed layer."""
        from transformers.activations import ACT2FN

        layer = nn.Module()
        layer.mlp = nn.Module()
        layer.mlp.act = ACT2FN[config.activation_function]
        return (), dict(self.family.arguments(config, layer, layer_idx or 0))


def hooks_of_layers(family: Family, place: Callable[[Any], tuple[Any, int]]) -> tuple[Any, Any, Any]:
    """``init_hook``, ``forward_hook`` and ``return_hook`` of a family's layers."""
    return LayerInit(family, place), _forward_hook, _return_hook


def _forward_hook(hidden_states: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden_states, kwargs.get("attention_mask")),), {}


def _return_hook(outputs: tuple[Any, ...]) -> Any:
    return outputs[0]
