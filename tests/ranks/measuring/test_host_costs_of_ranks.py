"""What the library takes on this machine is measured in the first run, and known in the next."""

import json
import random

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright import __version__
from shardwright.run.context import context
from shardwright.testing import run_ranks

SETTINGS = {"run_dir": "off", "microbatches": 2, "measure_s": 0.1, "pipeline": "1f1b"}


def losses_and_costs(profile="measured", **settings):
    sw.init({**SETTINGS, "profile": profile, **settings})
    torch.manual_seed(0)
    random.seed(0)
    model = sw.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)))

    @sw.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = [float(train(model, torch.ones(4, 8)).reduce_mean()) for _ in range(2)]
    plan, cluster = context().plan, context().cluster
    sw.shutdown()
    return losses, plan, cluster, random.random()


def test_a_run_measures_them_and_trains_as_without(monkeypatch, tmp_path):
    """Toys run in the middle of its first step, on its own ranks; they leave nothing behind."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    plain, _, fixed, drawn = run_ranks(losses_and_costs, 2, "estimated", plan="anew")[0]
    assert fixed.host_costs is None
    losses, plan, cluster, again = run_ranks(losses_and_costs, 2, plan="anew")[0]
    assert losses == plain
    assert again == drawn
    costs = cluster.host_costs
    assert 0 < costs.step_s + costs.action_s < 0.5
    assert cluster.loop_costs.step_s + cluster.loop_costs.action_s > 0
    assert plan.prediction.conditions.action_overhead_s == costs.action_s
    assert plan.prediction.alone_s > 0
    files = {path.name.rsplit("-", 1)[1]: path for path in (tmp_path / "host").iterdir()}
    assert set(files) == {"2x1x1.json", "1x1x1.json"}
    # The next run knows them in seconds of a plain loop, and scales them by the speed of its own moment.
    known = {"step_s": 100.0, "action_s": 10.0, "unit_s": 1.0, "operation_s": 0.5}
    assert json.loads(files["2x1x1.json"].read_text())[__version__].keys() == known.keys()
    files["2x1x1.json"].write_text(json.dumps({__version__: known}))
    _, _, cluster, _ = run_ranks(losses_and_costs, 2, plan="anew")[0]
    known = cluster.host_costs
    assert 0 < known.step_s < 50
    assert known.action_s == pytest.approx(known.step_s / 10)


@pytest.mark.parametrize(
    ("degrees", "file"),
    [
        ({"pipeline_parallel_degree": 1, "data_parallel_degree": 2, "plan_one_stage": True}, "1x2x1.json"),
        ({"pipeline_parallel_degree": 2, "data_parallel_degree": 1, "pipeline": "zb_h1"}, "2x1x1.json"),
        ({"replay": "off"}, "2x1x1-off.json"),
    ],
)
def test_they_are_those_of_the_grid_of_ranks(monkeypatch, tmp_path, degrees, file):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    run_ranks(losses_and_costs, 2, **{**SETTINGS, **degrees})
    assert any(path.name.endswith(file) for path in (tmp_path / "host").iterdir())
