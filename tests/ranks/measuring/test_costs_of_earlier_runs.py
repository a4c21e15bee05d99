"""Costs of an earlier run are used as long as they hold, and measured anew where they do not."""

import json

import pytest
import torch
from torch import nn

from shardwright.testing import run_ranks


def measured():
    from shardwright.config import Config
    from shardwright.torch.plan_here import Training, measure_here

    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)))

    training = Training(build=build, arguments=((torch.ones(64, 256),), {}), loss=lambda y: y.square().mean())
    measure_here(training, config=Config())


@pytest.mark.sweep
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_costs_that_do_not_hold_any_more_are_measured_anew(num_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    run_ranks(measured, num_ranks)
    (file,) = (tmp_path / "profile").glob("*.json")
    first = json.loads(file.read_text())
    of_another_time = {
        key: {**timing, "forward_s": 100 * timing["forward_s"]} for key, timing in first.items()
    }
    file.write_text(json.dumps({**of_another_time, "of another model": of_another_time[min(first)]}))
    run_ranks(measured, num_ranks)
    then = json.loads(file.read_text())
    assert then.keys() == first.keys()
    assert all(then[key]["forward_s"] < 0.5 * of_another_time[key]["forward_s"] for key in first)
