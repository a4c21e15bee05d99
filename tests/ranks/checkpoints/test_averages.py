"""Averages of the weights by the recipe of docs/script.md: saved with the run, on other degrees, too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.testing import run_ranks

STAGES: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2}
SHARDS: dict[str, Any] = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}


def trained(settings: dict[str, Any], folder: Path, until: int) -> dict[str, Tensor]:
    """The averages after so many steps, of which the folder may have some."""
    import shardwright.torch as sw

    sw.init({"run_dir": "off", "profile": "estimated", **settings})
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    model = sw.DistributedModel(nn.Sequential(*layers).double())
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @torch.no_grad()
    def average(decay: float = 0.5) -> None:
        for p in model.local_parameters():
            optimizer.state[p].setdefault("average", p.clone()).lerp_(p, 1 - decay)

    @torch.no_grad()
    def exchange() -> None:
        for p in model.local_parameters():
            own = p.clone()
            p.copy_(optimizer.state[p]["average"])
            optimizer.state[p]["average"].copy_(own)

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        model.backward(loss)
        return loss

    checkpoints = sw.Checkpoints(folder, every=2, asynchronous=False)
    step = checkpoints.resume()
    while step < until:
        generator = torch.Generator().manual_seed(10 * step)
        optimizer.zero_grad(set_to_none=True)
        train(model, torch.randn(4, 6, generator=generator, dtype=torch.float64))
        optimizer.step()
        average()
        step += 1
        checkpoints.step_done(step)
    checkpoints.close()
    exchange()
    found: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sw.shutdown()
    return found


@pytest.mark.parametrize(("first", "second"), [(STAGES, SHARDS), (SHARDS, None)])
def test_they_go_on_with_other_degrees(
    first: dict[str, Any], second: dict[str, Any] | None, tmp_path: Path
) -> None:
    """The recipe kept them in a dictionary, which no checkpoint had."""
    expected = run_ranks(trained, 1, {}, tmp_path / "whole", 4)[0]
    run_ranks(trained, 2, first, tmp_path / "cut", 2)
    for found in run_ranks(trained, 1 if second is None else 2, second or {}, tmp_path / "cut", 4):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.allclose(found[name], expected[name], atol=1e-12), name
