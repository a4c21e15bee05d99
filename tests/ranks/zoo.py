"""The zoo: models that must train over stages exactly as they train on one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import zoo_modules as modules
import zoo_networks as networks
from architectures import ARCHITECTURES
from torch import Tensor, nn
from transparency import Recipe
from zoo_modules import CLASSES, WIDTH

__all__ = ["OWN_MODELS", "TRANSFORMERS", "ZOO"]


def features(batch_size: int, length: int) -> dict[str, Any]:
    """Vectors, and the class of each."""
    return {
        "x": torch.randn(batch_size, length, WIDTH),
        "target": torch.randint(0, CLASSES, (batch_size, length)),
    }


def tokens(batch_size: int, length: int) -> dict[str, Any]:
    ids = torch.randint(0, CLASSES, (batch_size, length))
    return {"ids_BT": ids, "target": ids.roll(-1, 1)}


def images(batch_size: int, length: int) -> dict[str, Any]:
    target = torch.randint(0, CLASSES, (batch_size,))
    return {"x": torch.randn(batch_size, 3, length, length), "target": target}


def images_channels_last(batch_size: int, length: int) -> dict[str, Any]:
    batch = images(batch_size, length)
    return {**batch, "x": batch["x"].contiguous(memory_format=torch.channels_last)}


def volumes(batch_size: int, length: int) -> dict[str, Any]:
    size = length - length % 4
    return {
        "x": torch.randn(batch_size, 1, size, size, 4),
        "target": torch.randint(0, CLASSES, (batch_size, size, size, 4)),
    }


def padded(batch_size: int, length: int) -> dict[str, Any]:
    lengths = torch.randint(length // 2, length + 1, (batch_size, 1))
    return {**features(batch_size, length), "padding": torch.arange(length) >= lengths}


def two_views(batch_size: int, length: int) -> dict[str, Any]:
    left = torch.randn(batch_size, length, WIDTH)
    return {"left": left, "right": left + 0.1 * torch.randn_like(left)}


def nested(batch_size: int, length: int) -> dict[str, Any]:
    first, second, third = torch.randn(3, batch_size, length, WIDTH)
    target = torch.randint(0, CLASSES, (batch_size, length))
    return {"inputs": {"pair": (first, [second, third]), "factor": 0.5, "name": "nested"}, "target": target}


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The class dimension is the last one of sequences, the second one of images."""
    if target.dim() == 2:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return F.cross_entropy(logits, target)


def classify(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "target"}
    return cross_entropy(model(*inputs.values()), batch["target"])


def classify_with_dictionary(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    answer = model(x=batch["x"])
    penalty = sum(hidden.square().mean() for hidden in answer["hidden"]) / answer["size"]
    return cross_entropy(answer["logits"], batch["target"]) + 0.1 * penalty


def classify_deeply(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    losses = [cross_entropy(logits, batch["target"]) for logits in model(batch["x"])]
    return torch.stack(losses).mean()


def contrast(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits = model(batch["left"], batch["right"])
    return F.cross_entropy(logits, torch.arange(len(logits)))


def _own(
    build: Callable[[], nn.Module],
    batch: Callable[[int, int], Any] = features,
    loss: Callable[[nn.Module, Any], Tensor] = classify,
) -> Recipe:
    return Recipe(build=build, batch=batch, loss=loss)


OWN_MODELS: dict[str, Recipe] = {
    "MLP": _own(networks.mlp),
    "ResNet": _own(networks.ResNet, images),
    "dropout on channels last": _own(networks.DropoutOnChannelsLast, images_channels_last),
    "3-D U-Net": _own(networks.UNet3d, volumes),
    "TransformerEncoder": _own(networks.Encoder, padded),
    "LSTM": _own(networks.Recurrent),
    "calls one module twice": _own(modules.CallsOneModuleTwice),
    "dropout between blocks": _own(modules.DropoutBetweenBlocks),
    "dropout in blocks": _own(modules.DropoutInBlocks),
    "tied embeddings": _own(modules.TiedEmbeddings, tokens),
    "returns a dictionary": _own(modules.ReturnsDictionary, loss=classify_with_dictionary),
    "parameters in glue": _own(modules.ParametersInGlue),
    "changes in place": _own(modules.ChangesInPlace),
    "fills one tensor": _own(modules.FillsOneTensor),
    "changes views": _own(modules.ChangesViews),
    "changes its input": _own(modules.ChangesItsInput),
    "parameter-free middle": _own(modules.ParameterFreeMiddle),
    "transposes between blocks": _own(modules.TransposesBetweenBlocks),
    "boolean masks": _own(modules.BooleanMasks),
    "two towers": _own(modules.TwoTowers, two_views, contrast),
    "nested inputs": _own(modules.NestedInputs, nested),
    "hooks collect outputs": _own(modules.HooksCollectOutputs),
    "custom functions": _own(modules.CustomFunctions),
    "recomputes": _own(modules.Recomputes),
    "no_grad comes first": _own(modules.NoGradComesFirst),
    "deep supervision": _own(modules.DeepSupervision, loss=classify_deeply),
    "unused parameters": _own(modules.UnusedParameters),
    "stateful blocks": _own(modules.StatefulBlocks),
    "buffers in glue": _own(modules.BuffersInGlue),
}


def _recomputed(recipe: Recipe) -> Recipe:
    """The same with the model's own activation checkpointing."""

    def build() -> nn.Module:
        model: Any = recipe.build()
        model.gradient_checkpointing_enable()
        return model

    return replace(recipe, build=build)


TRANSFORMERS: dict[str, Recipe] = {
    name: ARCHITECTURES[name].recipe()
    for name in (
        *("GPT-2", "GPT-Neo", "GPT-J", "GPT-NeoX", "Bloom", "Llama"),
        *("BERT", "RoBERTa", "ALBERT", "T5", "Mixtral"),
    )
}
TRANSFORMERS["GPT-2, recomputed"] = _recomputed(TRANSFORMERS["GPT-2"])

ZOO: dict[str, Recipe] = OWN_MODELS | TRANSFORMERS
