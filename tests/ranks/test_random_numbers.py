"""Random numbers are those of a single process; where they cannot be, an error says so."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import Block, Stack

from shardwright.testing import RanksFailedError, run_ranks

CONFIG = {"microbatches": 4, "profile": "estimated"}
TWICE = Case(config=CONFIG, iterations=[Iteration()] * 2)


def stack_of(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Stack(6)
        model.blocks = nn.ModuleList(block() for _ in range(6))
        return model

    return build


# ---- how many are drawn -----------------------------------------------------------------------------------


class NoiseLikeTransposed(Block):
    """Kernels draw in another way where memory is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).transpose(1, 2)
        return (y + 0.1 * torch.randn_like(y)).transpose(1, 2)


def test_noise_like_a_tensor_that_is_not_contiguous():
    recipe = Recipe(
        build=stack_of(NoiseLikeTransposed),
        batch=features,
        loss=classify,
        dtype=torch.float32,
        tolerance=1e-4,
        loss_tolerance=1e-4,
    )
    assert run_ranks(differences, 2, recipe, TWICE) == [[], []]


class DrawsFromGamma(Block):
    def forward(self, x: Tensor) -> Tensor:
        shape, rate = torch.tensor(0.7, dtype=x.dtype), torch.tensor(1.0, dtype=x.dtype)
        return super().forward(x) + 0.1 * torch.distributions.Gamma(shape, rate).sample(x.shape)


class NoiseForSome(Block):
    """Its trace, on random data, may see that it draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        if x.detach()[0, 0, 0] > 0:
            x = x + 0.1 * torch.randn_like(x)
        return super().forward(x)


class SkipsItsDropout(Block):
    """Draws more where it does not skip itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return x.clone()
        return self.dropout(super().forward(x))


@pytest.mark.parametrize("block", [DrawsFromGamma, NoiseForSome, SkipsItsDropout])
def test_a_module_that_draws_as_many_as_values_say_is_refused(block):
    recipe = Recipe(build=stack_of(block), batch=features, loss=classify)
    message = rf"module {block.__name__} takes another amount of random numbers in microbatch \d than"
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(differences, 2, recipe, TWICE)


def test_a_distribution_between_modules_is_refused_where_values_decide_what_it_draws():
    def mixed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        alpha = torch.tensor(0.3, dtype=torch.float64)
        share = torch.distributions.Beta(alpha, alpha).sample()
        x = batch["x"]
        return classify(model, {**batch, "x": share * x + (1 - share) * x.flip(0)})

    recipe = Recipe(build=lambda: Stack(6), batch=features, loss=mixed)
    message = r"test_random_numbers\.py:\d+: _sample_dirichlet\(\) takes another amount of random numbers"
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(differences, 2, recipe, TWICE)
