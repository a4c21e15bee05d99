"""Parts of PyTorch that look at values or at whole calls: encoders, distributions, sparse tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences
from zoo import classify, features, padded
from zoo_modules import CLASSES, WIDTH, Block

from shardwright.testing import run_ranks


class ReadsAllPlaces(nn.Module):
    """Means over whole sequences, padding included, as a beginner writes them."""

    def __init__(self, *, norm: bool, embed: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True, dropout=0.0)
        self.embed = nn.Linear(WIDTH, WIDTH) if embed else nn.Identity()
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH) if norm else None)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=padding).mean(1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["padding"]), batch["target"][:, 0])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which the plain loop makes
def test_evaluations_read_zeros_where_the_input_is_padding():
    recipe = Recipe(build=lambda: ReadsAllPlaces(norm=True, embed=True), batch=padded, loss=loss)
    case = Case(iterations=[Iteration(), EVALUATION, Iteration(), EVALUATION])
    assert run_ranks(differences, 2, recipe, case) == [[], []]


class MasksByItself(ReadsAllPlaces):
    """Only one rank knows the mask."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return super().forward(x, self.embed(x.masked_fill(padding.unsqueeze(-1), 100.0)).amax(-1) > 10.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_mask_may_come_from_a_module():
    recipe = Recipe(build=lambda: MasksByItself(norm=True, embed=True), batch=padded, loss=loss)
    assert run_ranks(differences, 2, recipe, Case(iterations=[EVALUATION])) == [[], []]


class Autoencoder(nn.Module):
    """Its distributions are between its units, and look at what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
        self.statistics, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.statistics(self.encoder(x)).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, scale.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        divergence = torch.distributions.kl_divergence(posterior, prior).mean()
        return self.head(self.decoder(posterior.rsample())), divergence


def evidence(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, divergence = model(batch["x"])
    return -torch.distributions.Categorical(logits=logits).log_prob(batch["target"]).mean() + divergence


@pytest.mark.thorough
def test_distributions_between_units():
    recipe = Recipe(build=Autoencoder, batch=features, loss=evidence)
    assert run_ranks(differences, 2, recipe, Case(iterations=[Iteration(), EVALUATION])) == [[], []]


class Mixes(nn.Module):
    """Makes a sparse tensor of what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        sparse = torch.eye(WIDTH).roll(1, 0).to_sparse()
        self.register_buffer("places", sparse.indices())
        self.register_buffer("entries", sparse.values())

    def forward(self, x: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(self.places, self.entries, (WIDTH, WIDTH), check_invariants=False)
        return torch.sparse.mm(matrix, self.linear(x).flatten(0, 1).T).T.view_as(x)


def test_sparse_tensors_inside_units():
    def build() -> nn.Module:
        return nn.Sequential(*(Mixes() for _ in range(4)), nn.Linear(WIDTH, CLASSES))

    recipe = Recipe(build=build, batch=features, loss=classify)
    assert run_ranks(differences, 2, recipe, Case()) == [[], []]
