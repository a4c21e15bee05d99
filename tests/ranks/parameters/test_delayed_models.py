"""Models built without memory train as models built in the ordinary way."""

from typing import Any

import pytest
import torch
from sharded import QUIET
from torch import Tensor, nn

from choices import in_sweep
from shardwright.testing import run_ranks

WIDTH = 80


def build() -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def losses(settings, *, delayed, initialize=None):
    import shardwright.torch as sw

    sw.init({**QUIET, **settings})
    with sw.delay_param_initialization(enabled=delayed):
        model = build()
    assert all(layer.is_meta is delayed for layer in model.parameters() if layer.dim() == 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(optimizer)

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    found = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(8, WIDTH, generator=generator)
        optimizer.zero_grad()
        found.append(train(model, x).reduce_mean().item())
        optimizer.step()
    return found, model.state_dict()


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {}),
        (2, {"microbatches": 2}),
        (2, {"sharded_data_parallel_degree": 2}),
        in_sweep(4, {"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2}),
    ],
)
def test_it_trains_as_otherwise(ranks, settings):
    expected = run_ranks(losses, ranks, settings, delayed=False)
    found = run_ranks(losses, ranks, settings, delayed=True)
    for (own, state), (own_expected, expected_state) in zip(found, expected, strict=True):
        assert own == own_expected
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())


def memory_of_a_rank(settings):
    """The most elements of parameters that had memory at once, beside what they all are."""
    import shardwright.torch as sw
    import shardwright.torch.sharding.sharding as sharding

    sw.init({**QUIET, **settings})
    with sw.delay_param_initialization():
        model = build()
    made = []
    original = sharding.recorded_values
    sharding.recorded_values = lambda parameter: made.append(parameter.numel()) or original(parameter)
    wrapped = sw.DistributedModel(model)
    waiting = sum(p.numel() for p in model.parameters() if p.is_meta)

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    train(wrapped, torch.ones(4, WIDTH))
    return waiting, made


def test_shared_parameters_are_made_one_by_one_and_cut():
    for waiting, made in run_ranks(memory_of_a_rank, 2, {"sharded_data_parallel_degree": 2}):
        assert waiting == 5 * WIDTH**2
        assert made == [WIDTH**2] * 5


@pytest.mark.parametrize("settings", [in_sweep({}), {"sharded_data_parallel_degree": 2}])
def test_in_bfloat16(settings):
    settings = {**settings, "bf16": True}
    expected = run_ranks(losses, 2, settings, delayed=False)
    found = run_ranks(losses, 2, settings, delayed=True)
    assert [own for own, _ in found] == [own for own, _ in expected]
