"""Models with routed attention train over stages and replicas as in one process."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case

import shardwright.torch as sw
from shardwright.testing import run_ranks
from six_models import build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

ESTIMATED = {"profile": "estimated", "microbatches": 4}


def routed(make: Any) -> nn.Module:
    with sw.model_creation(flash_attention=True):
        model: nn.Module = make()
    return model


def padded(batch_size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (batch_size, length))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def whole(batch_size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (batch_size, length))
    return {"input_ids": ids, "labels": ids}


def recipe(name: str, *, dropout: float = 0.0, pads: bool = False, recomputes: bool = False) -> Recipe:
    def make() -> nn.Module:
        model = routed(functools.partial(build, name, dropout=dropout))
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return Recipe(
        build=make,
        batch=padded if pads else whole,
        loss=lambda model, batch: model(**batch).loss,
        loss_tolerance=1e-6,
    )


def check(recipe: Recipe, cases: dict[str, Case], *, num_ranks: int = 2) -> None:
    env = {"TRANSFORMERS_VERBOSITY": "error"}
    found = run_ranks(differences_by_case, num_ranks, recipe, cases, timeout_s=120, env=env)
    assert found == [{}] * num_ranks


def test_over_two_stages():
    case = Case(config=ESTIMATED, iterations=(Iteration(), Iteration(length=9)))
    check(recipe("BERT", dropout=0.1, pads=True), {"1f1b": case})


def test_with_recomputation_of_its_own_and_dropout():
    check(recipe("GPT-2", dropout=0.1, recomputes=True), {"1f1b": Case(config=ESTIMATED)})


def test_over_replicas():
    # The loss is in float32, and weighed by labels over replicas.
    case = Case(config={**ESTIMATED, "data_parallel_degree": 2}, tolerance=1e-6)
    check(recipe("GPT-J", dropout=0.1), {"two": case})


@pytest.mark.thorough
def test_attention_between_units():
    """A stage ends between the two projections: the function that attends is code between units."""

    def place(model: nn.Module) -> None:
        block = model.transformer.h[1].attn
        last = block.attention.out_proj
        for module in (last, model.transformer.h[2], model.transformer.h[3]):
            sw.set_partition(module, 1)

    settings = {**ESTIMATED, "auto_partition": False, "default_partition": 0}
    made = replace(recipe("GPT-Neo", dropout=0.1), place=place)
    check(made, {"by hand": Case(config=settings)})
