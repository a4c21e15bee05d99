"""The memory in use, as a run's timeline has it."""

from pathlib import Path

import torch
from torch import nn

from shardwright.observe import RunFolder
from shardwright.observe.recorded_steps import read_recorded_steps
from shardwright.testing import run_ranks


def train_divided(folder):
    import shardwright.torch as sw

    settings = {"tensor_parallel_degree": 2, "microbatches": 2, "profile": "estimated", "report": False}
    sw.init({**settings, "run_dir": folder, "run_name": "run"})
    model = sw.DistributedModel(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)))

    @sw.step
    def train_step(model, x):
        model.backward(model(x).square().mean())

    for _ in range(3):
        train_step(model, torch.ones(8, 64))
    sw.shutdown()


def test_a_rank_that_shares_layers_counts_its_own_part(tmp_path: Path) -> None:
    run_ranks(train_divided, 2, str(tmp_path))
    (step,) = read_recorded_steps(RunFolder(tmp_path / "run"))
    whole = 2 * 4 * (2 * 64 * 512 + 512 + 64)  # parameters and gradients
    (after,) = step.memory
    assert 0.49 * whole < after.state_bytes < 0.52 * whole
