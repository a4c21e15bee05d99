"""A state loaded into a model without memory, whose parameters replicas share from the first step on."""

import pytest
import torch
from stacks import train as squares
from torch import nn

import shardwright.torch as sw
from shardwright.testing import run_ranks

QUIET = {"run_dir": "off", "profile": "estimated", "timeout_s": 30}


def layers():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def first_loss(degree, how):
    sw.init({**QUIET, "sharded_data_parallel_degree": degree, "sdp_param_persistence_threshold": 0})
    torch.manual_seed(7)
    if how == "recorded":
        with sw.delay_param_initialization():
            module = layers()
    else:
        with torch.device("meta"):
            module = layers()
    model = sw.DistributedModel(module)
    torch.manual_seed(3)
    model.load_state_dict(layers().state_dict())
    train = sw.step(squares)
    loss = train(model, torch.arange(24.0).reshape(4, 6) / 24).reduce_mean().item()
    return loss, {name: value.tolist() for name, value in model.state_dict().items() if "weight" in name}


@pytest.mark.parametrize("how", ["recorded", "meta"])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_first_step_has_what_was_loaded(degree, how):
    """It began with the values of the initialisation: what was loaded was forgotten, without a word."""
    torch.manual_seed(3)
    plain = layers()
    loss = plain(torch.arange(24.0).reshape(4, 6) / 24).square().mean().item()
    weights = {name: value.tolist() for name, value in plain.state_dict().items() if "weight" in name}
    for found, state in (
        run_ranks(first_loss, 2, degree, how) if degree == 2 else run_ranks(first_loss, 1, 1, how)
    ):
        assert found == pytest.approx(loss, rel=1e-6)
        assert state == weights
