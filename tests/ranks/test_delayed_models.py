"""Models built without memory train as models built in the ordinary way."""

from typing import Any

import pytest
import torch
from sharded import QUIET
from torch import Tensor, nn

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
        (4, {"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2}),
    ],
)
def test_it_trains_as_otherwise(ranks, settings):
    expected = run_ranks(losses, ranks, settings, delayed=False)
    found = run_ranks(losses, ranks, settings, delayed=True)
    for (own, state), (own_expected, expected_state) in zip(found, expected, strict=True):
        assert own == own_expected
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())
