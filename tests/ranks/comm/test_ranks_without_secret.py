"""Ranks of several hosts to which nobody has given a secret: they train, and load no pickle of each other."""

from collections import namedtuple

import pytest
import torch
from torch import nn

import shardwright.torch as sw
from shardwright.comm.joining.process_group import seal_of_session
from shardwright.testing import run_ranks

Pair = namedtuple("Pair", ["data", "scale"])


def two_hosts(rank):
    """As torchrun tells ranks that are alone on their hosts."""
    return {
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "SHARDWRIGHT_SECRET": None,
        "SHARDWRIGHT_SECRET_FILE": None,
    }


class Remembers(nn.Linear):
    def __init__(self, memory):
        super().__init__(4, 4)
        self.memory = memory

    def get_extra_state(self):
        return self.memory

    def set_extra_state(self, state):
        self.memory = state


def train(memory):
    sw.init({"pipeline_parallel_degree": 2, "microbatches": 2, "profile": "estimated", "run_dir": "off"})
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(Remembers(memory), nn.Linear(4, 1)))
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @sw.step
    def step(model, pair, options):
        loss = (model(pair.data) * pair.scale).square().mean() * options["weight"]
        model.backward(loss)
        return loss

    batch = Pair(torch.arange(16.0).view(4, 4) / 16, 0.5)
    losses = []
    for _ in range(2):
        losses.append(float(step(model, batch, {"weight": 2.0}).reduce_mean()))
        optimizer.step()
        optimizer.zero_grad()
    return seal_of_session() is None, losses, sorted(model.state_dict())


def plain_losses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = (model(torch.arange(16.0).view(4, 4) / 16) * 0.5).square().mean() * 2.0
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_they_train_and_gather_states():
    for has_none, losses, names in run_ranks(train, 2, {"calls": 3}, env=two_hosts):
        assert has_none
        assert losses == pytest.approx(plain_losses(), rel=1e-6)
        assert "0._extra_state" in names
