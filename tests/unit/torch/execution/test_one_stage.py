"""Runs of one stage: what of a plan, and of the settings, they take."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.errors import StalePlanError
from shardwright.plan import Plan
from shardwright.torch.units.offline_planner import plan_model

LINK = Link(latency_s=1e-5, bandwidth_Bps=1e9)
CLUSTER = Cluster(device=Device(name="paper"), ranks_per_node=1, intra_node=LINK, inter_node=LINK)


class Block(nn.Module):
    calls = 0

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            Block.calls += 1
        return x + torch.tanh(self.linear(x))


def build(num_blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)), nn.Linear(8, 2)).double()


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 8, dtype=torch.double)


@pytest.fixture(autouse=True)
def run() -> Iterator[None]:
    Block.calls = 0
    yield
    sw.shutdown()


def train(model: Any, *, num_steps: int = 1) -> None:
    @sw.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(num_steps):
        model.zero_grad()
        step(model, batch())


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def plan_of(model: nn.Module, **settings: Any) -> Plan:
    return plan_model(
        model, batch(), config=Config.parse(settings), world_size=1, cluster=CLUSTER, loss=torch.sum
    )


def expected() -> list[Tensor]:
    model = build()
    model(batch()).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("by_plan", [False, True])
def test_everything_is_recomputed(by_plan: bool) -> None:
    """The setting was passed over: whoever ran out of memory without it did so with it."""
    settings = {"activation_checkpointing": "full", "microbatches": 2}
    model = build()
    sw.init(plan_of(copy.deepcopy(model), **settings) if by_plan else {**settings, "run_dir": "off"})
    train(sw.DistributedModel(model))
    assert Block.calls == 2 * 2 * 3, "each block twice in each microbatch"
    torch.testing.assert_close(gradients(model), expected(), rtol=0, atol=1e-12)


class ScalesAtRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() + np.random.rand())


def test_what_is_recomputed_draws_the_same_numbers_of_python() -> None:
    """The second forward drew others: gradients were of another function than the loss."""
    found, after = [], []
    for settings in ({"activation_checkpointing": "full"}, {}):
        torch.manual_seed(0)
        model = nn.Sequential(*(ScalesAtRandom() for _ in range(3))).double()
        random.seed(3)
        np.random.seed(3)
        sw.init({**settings, "microbatches": 2, "run_dir": "off"})
        train(sw.DistributedModel(model))
        sw.shutdown()
        found.append(gradients(model))
        after.append((random.random(), np.random.rand()))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    assert after[0] == after[1]


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    """Its predictions were written beside what another model took."""
    plan_of(build(4)).write(tmp_path / "plan.json")
    sw.init({"plan": str(tmp_path / "plan.json"), "run_dir": "off"})
    with pytest.raises(StalePlanError, match="another model"):
        train(sw.DistributedModel(build()))


def test_a_limit_that_nothing_keeps_to_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A run went on with a limit of 1000 bytes, without a word."""
    sw.init({"memory_limit": 1000, "run_dir": "off"})
    train(sw.DistributedModel(build()))
    (told,) = (text for text in caplog.messages if "memory_limit" in text)
    assert "Set plan_one_stage to have it checked" in told
