"""A run of one stage that is planned: the same gradients, and a prediction."""

import json
from pathlib import Path

import pytest
import torch

from choices import in_sweep
from shardwright.testing import run_ranks


def train(settings, *, steps=2):
    from torch import nn

    import shardwright.torch as sw

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))).double()
    sw.init({"run_name": "run", "plan_one_stage": True, **settings})
    model = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @sw.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(1 + sw.dp_rank())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        x = torch.randn(16, 32, generator=generator, dtype=torch.float64)
        losses.append(step(model, x).reduce_mean().item())
        optimizer.step()
    with torch.no_grad():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    sw.shutdown()
    file = Path(settings["run_dir"], "run", "plan.json")
    return losses, state, json.loads(file.read_text()) if file.exists() else None


@pytest.mark.parametrize(
    "settings",
    [
        in_sweep({}, id="replicas"),
        pytest.param({"data_parallel_degree": 2, "sharded_data_parallel_degree": 2}, id="shared"),
        pytest.param({"microbatches": 4, "activation_checkpointing": "full"}, id="recomputed"),
    ],
)
def test_the_same_values_with_a_prediction(settings, tmp_path):
    own = {"pipeline_parallel_degree": 1, **settings}
    planned = run_ranks(train, 2, {**own, "run_dir": str(tmp_path / "planned")})
    plain = run_ranks(train, 2, {**own, "plan_one_stage": False, "run_dir": str(tmp_path / "plain")})
    for (losses, state, plan), (expected_losses, expected, none) in zip(planned, plain, strict=True):
        assert none is None
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
        assert plan["mesh"]["pipeline"] == 1
        assert plan["mesh"]["data"] == 2
        assert plan["mesh"]["shard"] == settings.get("sharded_data_parallel_degree", 1)
        assert plan["prediction"]["step_s"] > 0
        assert plan["prediction"]["provenance"] == "measured"
        if "microbatches" in settings:
            assert plan["schedule"]["microbatches"] == 4
            assert all(stage["recompute"] == stage["units"] for stage in plan["stages"])


def test_one_rank(tmp_path):
    settings = {"pipeline": "gpipe", "microbatches": 4, "run_dir": str(tmp_path)}
    ((losses, _, plan),) = run_ranks(train, 1, settings)
    assert len(losses) == 2
    (memory,), (stage,) = plan["prediction"]["memory"], plan["prediction"]["stages"]
    assert memory["activations_bytes"] == stage["saved_bytes"]  # a microbatch at a time, as it runs
    assert plan["mesh"] == {"pipeline": 1, "data": 1, "shard": 1, "placement_strategy": "DPT"}


def cores_and_crowding(folder):
    """The cores of this process before the first step, and how many ranks share a core by the plan."""
    import os

    train({"run_dir": folder, "pipeline_parallel_degree": 1}, steps=1)
    plan = json.loads(Path(folder, "run", "plan.json").read_text())
    return len(os.sched_getaffinity(0)), plan["prediction"]["conditions"]["crowding"]


def test_all_cores_of_the_host_are_planned_with(tmp_path):
    (cores, crowding), _ = run_ranks(cores_and_crowding, 2, str(tmp_path))
    assert crowding == max(1.0, 2 / cores)
