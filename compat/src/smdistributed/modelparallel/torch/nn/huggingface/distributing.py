"""Puts distributed layers in the place of a Hugging Face model's own.

The model stays what it is, with its embeddings, heads, masks and losses; its layers are others, with the same
weights::

    transformer.h            12 GPT2Block            ─►   transformer.seq_layers   nn.Sequential of 12
    transformer.h.0.attn...                               DistributedTransformerLayer
"""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.torch.attention.hugging_face import PLAIN, left_alone
from shardwright.torch.parameters.delayed_initialization import copy_recorded
from shardwright.torch.parameters.unit_map import place_alike
from shardwright.torch.units.tensor_division import Pin, pin
from smdistributed.modelparallel.torch.nn.distributed import (
    DistributedLayerNorm,
    DistributedTransformerLayer,
)
from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta
from smdistributed.modelparallel.torch.nn.huggingface.family import Family
from smdistributed.modelparallel.torch.nn.huggingface.layers_as_one import LayerCall, LayersAsOne
from smdistributed.modelparallel.torch.nn.huggingface.names import SEQ_LAYERS
from smdistributed.modelparallel.torch.nn.huggingface.parts import to_smdistributed

_FAMILIES = (bert.FAMILY, roberta.FAMILY, gpt2.FAMILY, gptj.FAMILY, gptneo.FAMILY, gptneox.FAMILY)


def family_of(module: nn.Module) -> Family | None:
    """The family whose layers a module holds; None for none, and where they are distributed already."""
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("transformers."):
            continue
        for family in _FAMILIES:
            if kind.__name__ in family.containers:
                layers = module._modules.get(family.attribute)
                return family if isinstance(layers, nn.ModuleList) and len(layers) > 0 else None
    return None


def distribute_layers(container: Any, family: Family, options: Mapping[str, Any]) -> bool:
    """Replaces the layers in a module; returns whether it has."""
    config, theirs = container.config, container._modules[family.attribute]
    if beyond := family.beyond(config):
        warnings.warn(
            f"{family.name} keeps its own layers: distributed layers do not have {beyond}.", stacklevel=2
        )
        return False
    ours = [distributed_layer(config, layer, index, family, options) for index, layer in enumerate(theirs)]
    sequence = nn.Sequential(*ours)
    sequence.training = theirs.training
    modules = {SEQ_LAYERS if k == family.attribute else k: m for k, m in container._modules.items()}
    container._modules.clear()
    container._modules.update({**modules, SEQ_LAYERS: sequence})
    call = LayerCall(type(theirs[0]), ours[0])
    vars(container)[family.attribute] = [LayersAsOne(sequence, call)]
    if any(getattr(layer, "gradient_checkpointing", False) for layer in (container, *theirs)):
        sw.set_activation_checkpointing(sequence)
    if ours[0].options.fp32_residual_addition:
        _take_more_bits(container)
    return True


def distributed_layer(
    config: Any, layer: nn.Module, index: int, family: Family, options: Mapping[str, Any]
) -> DistributedTransformerLayer:
    """A distributed layer with the weights of one of Hugging Face's."""
    arguments = {**family.arguments(config, layer, index), **_attention_as_chosen(layer), **options}
    if arguments.get("zero_init"):
        made = DistributedTransformerLayer(**arguments)
        return made.to(dtype=next(layer.parameters()).dtype).train(layer.training)
    with torch.device("meta"):
        made = DistributedTransformerLayer(**arguments)
    with torch.enable_grad():  # views know whether they are trained
        views = to_smdistributed(
            dict(layer.named_parameters()), family.parts, f"{family.name} layer {index}: "
        )
    for name, view in views.items():
        owner, _, key = name.rpartition(".")
        made.get_submodule(owner)._parameters[key] = _parameter(view)
    made.train(layer.training)
    place_alike(made, layer)
    return made


def _parameter(view: Tensor) -> nn.Parameter:
    """A parameter of that content: the same one where it is all of it."""
    if isinstance(view, nn.Parameter):
        return view
    content = view.detach()
    copied = copy_recorded(content)
    if copied is None:
        copied = content.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copied, requires_grad=view.requires_grad)


def _attention_as_chosen(layer: nn.Module) -> dict[str, Any]:
    """How the script wants attention to be computed, as it was noted on the layer's own."""
    for module in layer.modules():
        choice = left_alone(module)
        if choice is not None and choice.kernel in (PLAIN.kernel, "eager"):
            return {"flash_attention": False, "plain_because": (choice.kernel, choice.why_not_fused)}
    return {}


def _take_more_bits(container: nn.Module) -> None:
    """Has the normalisations behind the layers take float32, whatever their weights are."""
    for child in container.children():
        if type(child) is nn.LayerNorm:
            child.__class__ = DistributedLayerNorm


def place_embedding(model: Any, *, distributed: bool) -> None:
    """Places the embedding of words, to which the head may be tied."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        # By words, so that the head needs no sum over ranks, and the loss no gathered logits.
        pin(embedding, "weight", Pin(0 if distributed else None))


def initialise_skipped(model: Any) -> None:
    """Initialises a transformers model for which the script has switched that off.

    Published scripts set ``PreTrainedModel.init_weights = lambda x: None`` before they create a model: in
    SageMaker's library, distributed modules had weights of their own.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return
    method = transformers.PreTrainedModel.init_weights
    if getattr(method, "__module__", "") == transformers.__name__:
        return
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            with torch.no_grad():
                module.apply(lambda part, outer=module: _initialise(part, outer, known))
            return


def _initialise(part: nn.Module, model: Any, known: dict[int, nn.Parameter]) -> None:
    _forget_recorded(part, known)
    if not any(parameter.is_meta for parameter in part.parameters()):
        model._init_weights(part)


def _forget_recorded(module: nn.Module, known: dict[int, nn.Parameter]) -> None:
    """Has parameters without memory initialised when they get it, by the model around them."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            made = known.setdefault(
                id(parameter), nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            )
            known[id(made)] = made
            module._parameters[name] = made
