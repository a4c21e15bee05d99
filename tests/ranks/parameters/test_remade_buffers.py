"""Buffers to which a forward gives another shape or type: lazily sized statistics, observers of QAT.

`state_dict()` aborted the process (64 bytes where a rank expected 4), or handed over memory that nobody had
filled; a checkpoint was saved that could not be resumed; a trace of `resize_` died.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import run_ranks, run_ranks_outcomes

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
    build: Callable[[], nn.Module], settings: dict[str, Any], *, dtype: torch.dtype = D
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
        losses.append(float(train(model, batch_of(sw.dp_rank()).to(dtype)).reduce_mean()))
        optimizer.step()
        plain_optimizer.zero_grad()
        others = [copy.deepcopy(plain) for _ in range(1, sw.dp_size())]
        total = []
        for replica, each in enumerate([plain, *others]):
            total.append(0.0)
            for part in batch_of(replica).to(dtype).chunk(4):
                loss = each(part).square().mean() / 4
                loss.backward()
                total[-1] += loss.item()
        for parameter, *copies in zip(*(m.parameters() for m in [plain, *others]), strict=True):
            parameter.grad = torch.stack([p.grad for p in (parameter, *copies)]).mean(0)
        plain_losses.append(total[sw.dp_rank()])
        plain_optimizer.step()
    if sw.dp_rank() > 0:  # its buffers are its own until the next step
        return losses, {}, plain_losses, {}
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
    "None first",
    "registered",
    "transient",
    "type",
    "grows",
    "shrinks",
]


@pytest.mark.parametrize(
    ("way", "ranks", "settings"),
    [*((way, 2, {}) for way in WAYS), ("replaced", 2, DATA)],
)
def test_trains_as_a_plain_loop(way, ranks, settings):
    check(run_ranks(lambda: trained(lambda: network(way), settings), ranks))


def resumed(way: str, settings: dict[str, Any], folder: str, *, first: int = 2) -> list[float]:
    """How far losses of a run that goes on with a model built anew are from those of one without a pause."""

    def begin() -> tuple[Any, Any, Any]:
        net = network(way)
        sw.init({**QUIET, **settings})
        model, optimizer = sw.DistributedModel(net), sw.DistributedOptimizer(sgd(net))
        return model, optimizer, sw.Checkpoints(folder, every=first)

    def go_on(model: Any, optimizer: Any, checkpoints: Any, steps: range) -> list[float]:
        train = sw.step(_train)
        losses = []
        for step in steps:
            optimizer.zero_grad()
            losses.append(float(train(model, batch_of(sw.dp_rank())).reduce_mean()))
            optimizer.step()
            checkpoints.step_done(step + 1)
        return losses

    run = begin()
    assert run[2].resume() == 0
    losses = go_on(*run, range(first))
    run[2].close()
    kept = copy.deepcopy(run[0].state_dict())
    expected = go_on(*run[:2], sw.Checkpoints(f"{folder}-other"), range(first, first + 2))
    sw.shutdown()
    run = begin()
    assert run[2].resume() == first
    if sw.pp_size() == 1:
        torch.testing.assert_close(dict(run[0].get_module().state_dict()), dict(kept), rtol=0, atol=0)
    found = go_on(*run, range(first, first + 2))
    return [abs(a - b) for a, b in zip(found, expected, strict=True)] + [0.0 if losses else 1.0]


@pytest.mark.parametrize(
    ("way", "ranks", "settings"),
    [("grows", 2, {}), ("registered", 2, {}), ("shrinks", 2, DATA)],
)
def test_a_run_goes_on_with_the_saved_shape(way, ranks, settings, tmp_path):
    for differences in run_ranks(resumed, ranks, way, settings, str(tmp_path / "saved")):
        assert differences == pytest.approx([0.0, 0.0, 0.0], abs=1e-15)


def test_a_buffer_that_one_replica_alone_makes_is_refused():
    def train():
        sw.init({**QUIET, **DATA})
        net = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)).double()
        model = sw.DistributedModel(net)
        if sw.rank() == 1:
            net[1].register_buffer("late", torch.zeros(2))
        sw.step(_train)(model, batch_of(0))

    for outcome in run_ranks_outcomes(train, 2):
        assert outcome.error_type == "UsageError"
        assert "late is" in outcome.error
        assert "rank 1" in outcome.error


class Expanded(nn.Module):
    """Its buffer repeats a row in memory that it has once."""

    def __init__(self, first: float):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("rows", self.rows_from(first))

    @staticmethod
    def rows_from(first: float) -> Tensor:
        return torch.arange(first, first + 3, dtype=D).expand(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.rows


def test_replicas_agree_on_an_expanded_buffer():
    """Wrapping failed, "broadcast takes tensors without holes", and named no buffer."""

    def trained_over_replicas() -> list[Any]:
        sw.init({**QUIET, **DATA})
        model = sw.DistributedModel(Expanded(10.0 * sw.rank()).double())

        @sw.step
        def train(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        seen = []
        for change in (False, True):
            if change:
                model.module.rows = Expanded.rows_from(10.0 * sw.rank() + 5)
            train(torch.ones(4, 3, dtype=D))
            seen.append((model.module.rows.tolist(), model.module.rows.stride()))
        sw.shutdown()
        return seen

    expected = [([[n, n + 1, n + 2]] * 4, (0, 1)) for n in (0, 5)]
    assert run_ranks(trained_over_replicas, 2) == [expected] * 2
