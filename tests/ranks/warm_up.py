"""What every rank would do for the first time, done once in the fork server before it forks.

The server imports this module (see ``conftest.py``). Imports that wait until they are needed, the first
traces on tensors without data, and the compression of the plotting library for reports took a rank about as
long as the rest of a small test. Only caches are filled: a test must not notice, save by its time.
"""

import contextlib
import importlib
import importlib.util
import pkgutil
from typing import Any

import torch
from torch import Tensor, nn
from transparency import Recipe
from zoo import ZOO

import shardwright
from shardwright.files.user_file import Record
from shardwright.observe.report.page import packed_library
from shardwright.torch.batch.batch import Batch
from shardwright.torch.randomness import get_state, set_state
from shardwright.torch.units.model_traces import trace_parts

# Engines import ray, which starts a thread: a process with threads cannot be forked.
_NOT_FOR_RANKS = tuple(f"shardwright.{name}" for name in ("cli", "__main__", "testing", "launch.engines"))
_TRACED = ("MLP", "ResNet", "tied embeddings")
_TRACED_OF_TRANSFORMERS = ("GPT-NeoX",)
_OF_TRANSFORMERS = "albert bert bloom gpt2 gpt_neo gpt_neox gptj llama mixtral roberta t5".split()


def _import_what_is_imported_late() -> None:
    for module in pkgutil.walk_packages(shardwright.__path__, "shardwright."):
        if not module.name.startswith(_NOT_FOR_RANKS):
            with contextlib.suppress(
                ImportError
            ):  # an extra that is not installed; tests that need it say so
                importlib.import_module(module.name)


def _trace(recipe: Recipe) -> None:
    def cast(item: Any) -> Any:
        return item.to(recipe.dtype) if item.is_floating_point() else item

    def step(model: nn.Module, batch: Any) -> Tensor:
        return recipe.loss(model, batch)

    model = recipe.build().to(recipe.dtype)
    part = {name: cast(item) for name, item in recipe.batch(2, 12).items()}
    trace_parts(
        model,
        step,
        {4: Batch(((model, part), {}))},
        device=torch.device("cpu"),
        num_stages=4,
    )


def _build_schemas() -> None:
    """Of files, which pydantic would build in each rank that reads or writes one."""
    kinds = [Record]
    while kinds:
        kind = kinds.pop()
        kind.model_rebuild()
        kinds += kind.__subclasses__()


def _warm_up() -> None:
    _import_what_is_imported_late()
    _build_schemas()
    traced = list(_TRACED)
    if importlib.util.find_spec("transformers") is not None:
        traced += _TRACED_OF_TRANSFORMERS
        for name in _OF_TRANSFORMERS:
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if importlib.util.find_spec("plotly") is not None:
        packed_library()
    if torch.version.cuda is not None or torch.version.hip is not None:
        return  # a trace asks the driver for GPUs, which starts threads: then the server could not fork
    before = get_state(torch.device("cpu"))
    for name in traced:
        _trace(ZOO[name])
    set_state(before, torch.device("cpu"))


_warm_up()
