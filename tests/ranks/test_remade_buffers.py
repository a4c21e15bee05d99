"""Buffers to which a forward gives another shape or type: lazily sized statistics, observers of QAT.

`state_dict()` aborted the process (64 bytes where a rank expected 4), or handed over memory that nobody had
filled; a checkpoint was saved that could not be resumed; a trace of `resize_` died.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright.torch as sw
from choices import in_sweep
from shardwright.errors import UsageError
from shardwright.testing import run_ranks, run_ranks_outcomes
from shardwright.torch.context import context
from shardwright.torch.trace_guard import Unchanged
from shardwright.torch.unit_map import UnitMap

QUIET = {"profile": "estimated", "run_dir": "off", "microbatches": 4, "timeout_s": 30}
DATA = {"data_parallel_degree": 2}
D = torch.float64


class Observed(nn.Module):
    """A unit around a unit, as its own code looks at the shape of a buffer that it makes."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.inner = nn.Linear(8, 8)
        if way == "None first":
            self.register_buffer("seen", None)
        elif way != "registered":
            self.register_buffer("seen", torch.empty(0, dtype=D), persistent=way != "transient")

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self._observe(x.detach().amax(0) + self.inner.weight.amax(1))
        return (self.inner(x) / (1 + self.seen.abs().max())).tanh()

    def _observe(self, now: Tensor) -> None:
        seen = getattr(self, "seen", None)
        if seen is not None and seen.numel():
            now = torch.maximum(seen.to(now.dtype), now)
        if self.way == "registered" and seen is None:
            self.register_buffer("seen", now.clone())
        elif self.way in ("resize_", "transient"):
            self.seen.resize_(now.shape).copy_(now)
        elif self.way == "set_":
            self.seen.set_(now.clone())
        elif self.way == "data":
            self.seen.data = now.clone()
        elif self.way == "type":
            self.seen = now.to(torch.float32)
        else:
            self.seen = now.clone()


class Leaf(nn.Module):
    """One unit, with a buffer of one element that gets 8, as a per-channel scale does."""

    def __init__(self, way: str):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.register_buffer("scale", torch.ones(1 if way == "grows" else 8, dtype=D))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            now = self.weight.detach().abs()
            self.scale = now.amax(1) if self.way == "grows" else now.amax().reshape(1)
        return (x @ self.weight.t() / self.scale).tanh()


LEAVES = {"grows": Leaf, "shrinks": Leaf}


def network(way: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(LEAVES.get(way, Observed)(way) for _ in range(4))).double()


def batch_of(replica: int) -> Tensor:
    return torch.randn(8, 8, dtype=D, generator=torch.Generator().manual_seed(replica))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def _train(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def trained(
    build: Callable[[], nn.Module], settings: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Losses and state of two steps on ranks, and of a plain loop, whose buffers see the first replica."""
    net = build()
    plain = copy.deepcopy(net)
    sw.init({**QUIET, **settings})
    model = sw.DistributedModel(net)
    optimizer, plain_optimizer = sw.DistributedOptimizer(sgd(net)), sgd(plain)
    train = sw.step(_train)
    losses, plain_losses = [], []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(float(train(model, batch_of(sw.dp_rank())).reduce_mean()))
        optimizer.step()
        plain_optimizer.zero_grad()
        others = [copy.deepcopy(plain) for _ in range(1, sw.dp_size())]
        total = []
        for replica, each in enumerate([plain, *others]):
            total.append(0.0)
            for part in batch_of(replica).chunk(4):
                loss = each(part).square().mean() / 4
                loss.backward()
                total[-1] += loss.item()
        for parameter, *copies in zip(*(m.parameters() for m in [plain, *others]), strict=True):
            parameter.grad = torch.stack([p.grad for p in (parameter, *copies)]).mean(0)
        plain_losses.append(total[sw.dp_rank()])
        plain_optimizer.step()
    return losses, model.state_dict(), plain_losses, plain.state_dict()


def check(found: list[Any]) -> None:
    for losses, state, plain_losses, plain_state in found:
        assert losses == pytest.approx(plain_losses, rel=1e-12)
        assert list(state) == list(plain_state)
        for name, value in plain_state.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


WAYS = [
    "resize_",
    "replaced",
    "set_",
    "data",
    "None first",
    "registered",
    "transient",
    "type",
    "grows",
    "shrinks",
]


@pytest.mark.parametrize(
    ("way", "ranks", "settings"),
    [
        *((way, 2, {}) for way in WAYS),
        *((way, 2, DATA) for way in ("resize_", "replaced", "None first", "type", "shrinks")),
        *(in_sweep(way, 2, DATA) for way in ("set_", "data", "registered", "transient", "grows")),
        ("replaced", 4, DATA),
        in_sweep("grows", 4, DATA),
    ],
)
def test_trains_as_a_plain_loop(way, ranks, settings):
    check(run_ranks(lambda: trained(lambda: network(way), settings), ranks))
