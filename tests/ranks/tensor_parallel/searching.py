"""The search for placements of small models of Hugging Face, layer by layer."""

import functools

import torch
from language_models import MODELS

from model_units import loss_alone, units_of
from shardwright.torch.tensor_parallel.search.search import find_placements
from shardwright.torch.tensor_parallel.search.unit import Unit
from shardwright.torch.tensor_parallel.search.ways import FoundPlacements

LAYERS = {
    "llama": ["model.layers"],
    "mixtral": ["model.layers"],
    "gpt2": ["transformer.h"],
    "bert": ["bert.encoder.layer"],
    "gpt_neox": ["gpt_neox.layers"],
    "t5": ["encoder.block", "decoder.block"],
}
VARIANTS = {
    "llama with one key head": ["model.layers"],
    "gpt2 with dropout": ["transformer.h"],
    "gpt2 odd": ["transformer.h"],
}


def model_of(name: str, **sizes):
    import transformers

    kind, config, settings = MODELS[name]
    config = getattr(transformers, config)(**{"bos_token_id": 1, "eos_token_id": 2, **settings, **sizes})
    config.use_cache = False
    if name == "mixtral":  # the way of a loop over experts depends on data
        config._experts_implementation = "grouped_mm"
    model = getattr(transformers, kind)(config).train()
    # Without data, the kernel for all experts knows 16 bits only.
    return model.bfloat16() if name == "mixtral" else model


def units(name: str, *, tokens: int = 32, **sizes) -> dict[str, Unit]:
    model = model_of(name, **sizes)
    ids = torch.zeros(4, tokens, dtype=torch.int64)
    lists = (LAYERS | VARIANTS)[name]
    layers = [f"{each}.{index}" for each in lists for index in range(len(model.get_submodule(each)))]
    batch = {"input_ids": ids, "labels": ids}
    return units_of(model, kwargs=batch, units=layers, run=loss_alone)


@functools.cache
def searched(name: str, num_ranks: int, **sizes) -> FoundPlacements:
    return find_placements(units(name, **sizes), num_ranks=num_ranks)
