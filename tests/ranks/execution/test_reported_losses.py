"""The loss of a step in its metrics, where the script gives its backward another number than it returns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.testing import run_ranks


def accumulated(runs: str, *, scales: bool) -> tuple[list[float], list[dict[str, Any]]]:
    """Two updates of two steps each, resumed from a checkpoint between them: losses, and metrics."""
    from torch import nn

    import shardwright.torch as sw

    returned: list[float] = []
    for updates in (1, 2):
        torch.manual_seed(0)
        sw.init({"run_name": "run", "run_dir": runs, "microbatches": 2, "measure_s": 0.1})
        model = sw.DistributedModel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
        optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", enabled=scales)

        @sw.step
        def step(model: Any, x: torch.Tensor, scaler: Any = scaler) -> torch.Tensor:
            loss = model(x * 1.0).square().mean()
            model.backward(scaler.scale(loss / 2))
            return loss

        checkpoints = sw.Checkpoints(every=1)
        for update in range(checkpoints.resume(), updates):
            optimizer.zero_grad(set_to_none=True)
            for _ in range(2):
                returned.append(step(model, torch.ones(4, 8)).reduce_mean().item())
            scaler.step(optimizer)
            scaler.update()
            checkpoints.step_done(update + 1)
        checkpoints.close()
        sw.shutdown()
    lines = Path(runs, "run", "metrics.jsonl").read_text().splitlines()
    return returned, [json.loads(line) for line in lines]


@pytest.mark.parametrize("scales", [True, False], ids=["scaled", "divided"])
def test_it_is_reported_and_steps_go_on_where_they_were(tmp_path: Path, scales: bool) -> None:
    """Bug: a pipeline reported no loss; and the second part counted from the script's steps, so that its
    metrics replaced those of the first."""
    (returned, metrics), _ = run_ranks(accumulated, 2, str(tmp_path), scales=scales)
    assert [each["step"] for each in metrics] == [1, 2, 3, 4]
    assert all(each["time/outside_units(s)"] > 0 for each in metrics)  # the product before the model
    assert all(each["memory/limit(GiB)"] > 0 for each in metrics)  # the second part looks at no machines
    assert [each["train/loss"] for each in metrics] == pytest.approx(
        [loss / 2 for loss in returned], rel=1e-4
    )
