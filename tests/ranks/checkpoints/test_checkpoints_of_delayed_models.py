"""Models without memory resume too: each rank reads its own part when it knows which that is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import Dropped
from sharded import QUIET, VOCABULARY
from stacks import train as squares

import shardwright.torch as sw
from shardwright.testing import run_ranks


def training(
    settings: dict[str, Any], folder: Path, built: str, *, first: int, until: int, saves: bool = True
) -> Any:
    """Losses; the model is built in the ordinary way, on the meta device, or with delayed initialization."""
    sw.init({**QUIET, "microbatches": 2, **settings})
    torch.manual_seed(0 if first == 0 else 9)
    if built == "meta":
        with torch.device("meta"):
            module = Dropped(dropout=0.0)
    elif built == "delayed":
        with sw.delay_param_initialization():
            module = Dropped(dropout=0.0)
    else:
        module = Dropped(dropout=0.0)
    model = sw.DistributedModel(module)
    updates = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    checkpoints = sw.Checkpoints(folder)
    assert checkpoints.resume() == first
    train = sw.step(squares)
    losses = []
    for step in range(first, until):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, VOCABULARY, (4, 5), generator=generator)
        updates.zero_grad()
        losses.append(train(model, x).reduce_mean().item())
        updates.step()
    if saves:
        checkpoints.save(until)
        checkpoints.close()
    return losses


STAGES = {"pipeline_parallel_degree": 2}
SHARDS = {"sharded_data_parallel_degree": 2}
LAYERS = {"tensor_parallel_degree": 2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "built"),
    [(STAGES, "delayed"), (SHARDS, "delayed"), (LAYERS, "meta")],
)
def test_they_go_on_as_an_ordinary_model_does(settings: dict[str, Any], built: str, tmp_path: Path) -> None:
    whole = run_ranks(training, 1, {}, tmp_path / "whole", "ordinary", first=0, until=4)[0]
    run_ranks(training, 1, {}, tmp_path / "cut", "ordinary", first=0, until=2)
    for losses in run_ranks(training, 2, settings, tmp_path / "cut", built, first=2, until=4, saves=False):
        assert losses == pytest.approx(whole[2:], rel=1e-5)


def test_what_waits_for_the_first_step_is_not_saved_half_loaded(tmp_path: Path) -> None:
    """A signal before the first step must not put a checkpoint without optimizer state above the good one."""
    run_ranks(training, 1, {}, tmp_path, "ordinary", first=0, until=2)
    settings = {"pipeline_parallel_degree": 2}
    run_ranks(training, 2, settings, tmp_path, "meta", first=2, until=2)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000002"]


def test_a_model_without_values_is_not_saved(tmp_path: Path) -> None:
    from shardwright.testing import RanksFailedError

    with pytest.raises(RanksFailedError, match="the model has no values yet"):
        run_ranks(training, 2, {"pipeline_parallel_degree": 2}, tmp_path, "meta", first=0, until=0)
