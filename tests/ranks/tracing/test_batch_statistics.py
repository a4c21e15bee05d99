"""Statistics over the samples of a microbatch: found, said, and over the whole batch on demand.

Buffers that `torch.utils.checkpoint` changes a second time in the backward.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import WIDTH, Stack

import shardwright.torch as sw
from shardwright.errors import TraceError
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.tracing.batch_statistics import (
    refuse_recomputed_vectors,
)

SETTINGS: dict[str, Any] = {"profile": "estimated", "run_dir": "off"}


class Whitened(nn.Module):
    """A batch norm of a script's own, with a running mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("centre", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.transpose(0, 1).reshape(x.shape[1], -1).mean(1)
        if self.training:
            self.centre.lerp_(mean.detach(), 0.1)
        return (x - mean) * self.scale


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(super().forward(x), None, None, training=True)


class Split(nn.Sequential):
    """Of several units, with a batch norm between them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(super().forward(x), None, None, training=True)


class BatchNormAct(nn.BatchNorm1d):
    """As in timm: a batch norm with the activation behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def frozen(module: nn.Module) -> nn.Module:
    """Its statistics are kept, as in detection models."""
    return module.eval()


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)], ("1", "2")),
        ([BatchNormAct(8), nn.SyncBatchNorm(8)], ("1", "2")),
        ([frozen(nn.BatchNorm1d(8)), nn.LayerNorm(8), nn.Dropout(0.5)], ()),
        ([Functional(8, 8), nn.BatchNorm1d(8)], ("2", "1")),
        ([nn.utils.spectral_norm(nn.Linear(8, 8))], ()),
        ([nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))], ()),
        ([nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2), nn.Flatten()], ()),
        ([nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()], ("2",)),
    ],
    ids=lambda value: "-".join(type(each).__name__ for each in value) if isinstance(value, list) else "",
)
def test_layers_are_found(layers: list[nn.Module], found: tuple[str, ...]):
    model = nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 1))
    assert sw.trace_model(model, torch.randn(6, 8)).batch_statistics == found


def test_a_batch_norm_between_units_is_found():
    model = Split(nn.Linear(8, 8), nn.Linear(8, 8))
    (found,) = sw.trace_model(model, torch.randn(6, 8)).batch_statistics
    assert "batch_norm at" in found


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(100, 8),
        Whitened(8),
        nn.BatchNorm1d(8, affine=False),
        nn.Linear(8, 3),
    ).double()


def differences_to_the_whole_batch(settings: dict[str, Any]) -> list[float]:
    """Of losses, gradients and the state after two steps."""
    torch.manual_seed(0)
    model = pictures()
    plain = copy.deepcopy(model)
    sw.init({**SETTINGS, **settings})
    wrapped = sw.DistributedModel(model)
    mine = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(plain.parameters(), 0.1)

    @sw.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    found = [0.0, 0.0]
    for _ in range(2):
        x, y = torch.randn(12, 1, 9, 9, dtype=torch.float64), torch.randint(0, 3, (12,))
        mine.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        loss = train_step(wrapped, x, y).reduce_mean()
        expected = F.cross_entropy(plain(x), y)
        expected.backward()
        own = dict(plain.named_parameters())
        gradients = [
            float((p.grad - own[name].grad).abs().max()) for name, p in wrapped.local_named_parameters()
        ]
        found = [max(found[0], abs(float((loss - expected).detach()))), max(found[1], *gradients)]
        mine.step()
        theirs.step()
    state = wrapped.state_dict()
    return [
        *found,
        max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items()),
    ]


def test_statistics_of_the_whole_batch():
    """A batch norm was trained over microbatches of few samples, and nothing could be done about it."""
    for found in run_ranks(differences_to_the_whole_batch, 2, {"microbatches": 1}):
        assert max(found) < 1e-12
    cut = run_ranks(differences_to_the_whole_batch, 2, {"microbatches": 4})
    assert min(min(found) for found in cut) > 1e-4  # the test can fail


LENGTH = 12


class Normalised(nn.Module):
    """Recomputes a part of itself, one way or the other."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)
        self.reentrant = reentrant

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._inner, x.clone(), use_reentrant=self.reentrant)


def statistics(kind: type[nn.Module], num_microbatches: int) -> tuple[list[str], list[str]]:
    """What differs from a plain loop, and the warnings of buffers that may."""
    recipe = Recipe(build=lambda: nn.Sequential(kind(), Stack(3)), batch=features, loss=classify)
    config = {"microbatches": num_microbatches, "profile": "estimated"}
    case = Case(config=config, iterations=[Iteration(length=LENGTH)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = differences(recipe, case)
    return found, [str(item.message) for item in caught if "a second time" in str(item.message)]


class Reentrant(Normalised):
    def __init__(self) -> None:
        super().__init__(reentrant=True)


class Teaches(Normalised):
    """Its teacher, which is not recomputed, goes through the same norm."""

    def _inner(self, x: Tensor) -> Tensor:
        return super()._inner(x) if torch.is_grad_enabled() else self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = checkpoint(self._inner, 2 * x, use_reentrant=False)
        return x + torch.tanh(self.up(x)) - target


class Spectral(Normalised):
    def __init__(self) -> None:
        super().__init__(reentrant=False)
        self.up, self.norm = parametrizations.spectral_norm(self.up), nn.Identity()


@pytest.mark.thorough
def test_spectral_norms_that_are_computed_twice():
    """Losses and gradients were others, by a percent or two, and a warning spoke of buffers alone."""
    hook = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)))
    with pytest.raises(TraceError, match=r"a spectral norm \(0\.weight_u\) a second time"):
        refuse_recomputed_vectors(hook, ["0.weight_u"])
    with pytest.raises(RanksFailedError, match=r"a spectral norm \(0\.up\.parametrizations\.weight\.0\._"):
        run_ranks(statistics, 2, Spectral, 4)
    for found, _ in run_ranks(statistics, 2, Spectral, 1):
        assert found == []


def test_running_statistics_that_are_updated_twice():
    """Other microbatches come in between the two updates, which a warning says."""
    for found, told in run_ranks(statistics, 2, Normalised, 1):
        assert (found, told) == ([], [])
    for found, told in run_ranks(statistics, 2, Normalised, 4):
        assert len(told) == 1
        assert all("running_" in line for line in found)
    for found, _ in run_ranks(statistics, 2, Reentrant, 1):
        assert found == []
    for found, told in run_ranks(statistics, 2, Teaches, 4):
        assert (found, told) == ([], [])
