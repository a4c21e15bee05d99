"""Random numbers are those of a single process; where they cannot be, an error says so."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import Block, Stack

from choices import some_combinations
from shardwright.testing import RanksFailedError, run_ranks

CONFIG = {"microbatches": 4, "profile": "estimated"}
TWICE = Case(config=CONFIG, iterations=[Iteration()] * 2)


def stack_of(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Stack(6)
        model.blocks = nn.ModuleList(block() for _ in range(6))
        return model

    return build


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


class SeedsInside(Block):
    """Its dropout goes on where it was before the seed."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1, self.training)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(42)
            noise = torch.randn(x.shape, dtype=x.dtype)
        return F.dropout(super().forward(x + noise), 0.1, self.training)


class SeedsBetweenBlocks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(42)
                noise = torch.randn(x.shape, dtype=x.dtype)
            x = self.dropout(block(x + noise))
        return self.head(x)


class TakesItsGradient(Block):
    """The backward inside of its forward computes, and draws, a second time what the forward drew."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            y = checkpoint(self._noisy, start, use_reentrant=False)
            slope = torch.autograd.grad(y.square().sum(), start)[0]
        return F.dropout(super().forward(x) + 0.1 * slope, 0.1, self.training)

    def _noisy(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x), 0.1, self.training)


@pytest.mark.parametrize(
    ("build", "pipeline"),
    some_combinations(
        [stack_of(SeedsInside), SeedsBetweenBlocks, stack_of(TakesItsGradient)], ["1f1b", "zb_v"]
    ),
)
def test_numbers_of_a_fixed_seed_leave_all_others_as_they_are(build, pipeline):
    recipe = Recipe(build=build, batch=features, loss=classify)
    case = Case(config={**CONFIG, "pipeline": pipeline}, iterations=[Iteration()] * 2)
    assert run_ranks(differences, 2, recipe, case) == [[], []]


class DropoutBeforeASeed(SeedsBetweenBlocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(block(x))
        torch.manual_seed(7)
        return self.head(x)


class SeedsForGood(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return super().forward(x) + torch.randn(x.shape, dtype=x.dtype)


@pytest.mark.parametrize("build", [DropoutBeforeASeed, stack_of(SeedsForGood)])
def test_a_seed_that_other_stages_would_not_see_is_refused(build):
    recipe = Recipe(build=build, batch=features, loss=classify)
    with pytest.raises(RanksFailedError, match=r"has set the state of a generator"):
        run_ranks(differences, 2, recipe, TWICE)


class NoiseOfItsOwn(Block):
    """Each block has a generator, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(3)]

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, dtype=x.dtype, generator=self.generators[0])
        return F.dropout(super().forward(x) + 0.1 * noise, 0.1, self.training)


class OneGeneratorForAll(Stack):
    """Modules and the code between them draw from one."""

    block: type[NoiseOfItsOwn] = NoiseOfItsOwn

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(6))
        for block in self.blocks:
            block.generators = self.blocks[0].generators

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + torch.randn(x.shape, dtype=x.dtype, generator=self.blocks[0].generators[0]))
        return self.head(x)


@pytest.mark.parametrize(
    ("build", "pipeline"),
    [(stack_of(NoiseOfItsOwn), "1f1b"), (OneGeneratorForAll, "zb_v")],
)
def test_a_generator_of_the_models_own(build, pipeline):
    recipe = Recipe(build=build, batch=features, loss=classify)
    case = Case(config={**CONFIG, "pipeline": pipeline}, iterations=[Iteration()] * 2)
    assert run_ranks(differences, 2, recipe, case) == [[], []]


class Drops(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class CheckpointsDropout(Stack):
    """The user checkpoints blocks with dropout by hand."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drops() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant and x.requires_grad)
        return self.head(x)


class CheckpointsDropoutReentrantly(CheckpointsDropout):
    reentrant = True


@pytest.mark.parametrize(
    ("build", "pipeline"),
    some_combinations([CheckpointsDropout, CheckpointsDropoutReentrantly], ["1f1b", "zb_v"]),
)
def test_dropout_is_recomputed_with_the_mask_of_its_forward(build, pipeline):
    """The state of the generators was saved before the block had got its own."""
    recipe = Recipe(build=build, batch=features, loss=classify)
    case = Case(config={**CONFIG, "pipeline": pipeline}, iterations=[Iteration()] * 2)
    assert run_ranks(differences, 2, recipe, case) == [[], []]
