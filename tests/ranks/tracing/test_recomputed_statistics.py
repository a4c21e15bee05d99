"""Buffers that `torch.utils.checkpoint` changes a second time in the backward."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import WIDTH, Stack

from shardwright.errors import TraceError
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.tracing.batch_statistics import (
    refuse_recomputed_vectors,
)

LENGTH = 12


class Normalised(nn.Module):
    """Recomputes a part of itself, one way or the other."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)
        self.reentrant = reentrant

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._inner, x.clone(), use_reentrant=self.reentrant)


class Frozen(Normalised):
    """Its batch norm is not recomputed: nothing in it needs gradients."""

    def __init__(self) -> None:
        super().__init__(reentrant=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + checkpoint(self._inner, x.detach(), use_reentrant=False)


class Recomputing(Stack):
    def __init__(self) -> None:
        super().__init__()
        kinds = [Normalised(reentrant=False), Frozen(), Normalised(reentrant=True)]
        self.blocks = nn.ModuleList([*kinds, *(Normalised(reentrant=False) for _ in range(3))])

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block._inner, x, use_reentrant=False) if number > 3 else block(x)
        return self.head(x)


def test_running_statistics_that_are_updated_twice():
    """Other microbatches came in between the two updates, and the statistics were others."""
    recipe = Recipe(build=Recomputing, batch=features, loss=classify)
    case = Case(config={"microbatches": 4, "profile": "estimated"}, iterations=[Iteration(length=LENGTH)] * 2)
    assert run_ranks(differences, 2, recipe, case) == [[], []]


class Teaches(Normalised):
    """Its teacher, which is not recomputed, goes through the same norm."""

    def __init__(self) -> None:
        super().__init__(reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = checkpoint(self._inner, 2 * x, use_reentrant=False)
        return super().forward(x) - target


def statistics(kind: type[nn.Module], num_microbatches: int) -> tuple[list[str], list[str]]:
    """What differs from a plain loop, and the warnings of buffers that may."""
    recipe = Recipe(build=lambda: nn.Sequential(kind(), Stack(3)), batch=features, loss=classify)
    config = {"microbatches": num_microbatches, "profile": "estimated"}
    case = Case(config=config, iterations=[Iteration(length=LENGTH)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = differences(recipe, case)
    return found, [str(item.message) for item in caught if "a second time" in str(item.message)]


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


def test_norms_that_are_also_called_without_being_recomputed():
    """The momentum of two updates was taken for one; one microbatch was enough to see it."""
    for found, told in run_ranks(statistics, 2, Teaches, 1):
        assert found == []
        assert len(told) == 1
