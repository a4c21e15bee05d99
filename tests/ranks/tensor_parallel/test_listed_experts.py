"""Ranks that share experts in lists train a model as one process does, whatever its loop over the experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from listed_experts import BLOCKS, SparseModel
from test_shared_experts import case
from test_shared_layers import WORDS
from test_shared_sequences import clip_norm
from torch import Tensor
from transparency import EVALUATION, Case, Iteration, Recipe, differences_by_case

import shardwright.torch as sw
from shardwright.testing import run_ranks


def sparse(*blocks: str, **options: Any) -> Recipe:
    def batch(batch_size: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(0, WORDS, (batch_size, length))
        return {"ids_BT": ids, "target": ids.roll(-1, 1)}

    return Recipe(
        build=lambda: SparseModel(*blocks, **options), batch=batch, loss=lambda model, batch: model(**batch)
    )


def check(recipe: Recipe, cases: Mapping[str, Case], *, num_ranks: int) -> None:
    found = run_ranks(differences_by_case, num_ranks, recipe, cases, timeout_s=200)
    assert found == [{}] * num_ranks


@pytest.mark.thorough
def test_ranks_share_experts_in_lists():
    """Bug: where a shape came later, all but the first rank forgot in copies of units, and all waited."""
    uneven = Iteration(batch_size=7, length=5)
    steps = case(2, iterations=(uneven, Iteration(length=6), EVALUATION), least_divided=0.5)
    check(sparse(*BLOCKS), {"three steps": steps}, num_ranks=2)


@pytest.mark.thorough
def test_shards_of_listed_experts():
    settings = {
        "pipeline_parallel_degree": 1,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 20,
    }
    shards = case(2, settings, iterations=(Iteration(length=6),) * 2, clip=clip_norm, least_divided=0.0)
    check(sparse("Mixtral", "Switch"), {"shards": shards}, num_ranks=4)


def losses(settings: Mapping[str, Any], folder: Path, steps: int) -> list[float]:
    """Losses of steps with AdamW, from the newest checkpoint of the folder on; the last one is saved."""
    sw.init({"run_dir": "off", "profile": "estimated", "microbatches": 2, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(SparseModel("Mixtral", "Qwen").double())
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    checkpoints = sw.Checkpoints(folder, every=2)
    first = checkpoints.resume()

    @sw.step
    def train(model: Any, ids: Tensor) -> Tensor:
        loss: Tensor = model(ids, ids.roll(-1, 1))
        model.backward(loss)
        return loss

    found = []
    for step in range(first, first + steps):
        ids = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        found.append(train(model, ids).reduce_mean().item())
        optimizer.step()
        checkpoints.step_done(step + 1)
    checkpoints.wait()
    return found
