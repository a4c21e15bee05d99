"""Buffers, modules and tensors that several units hold, and that one of them changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

CONFIG = {"microbatches": 4, "profile": "estimated", "pipeline_parallel_degree": 2}
V = {**CONFIG, "pipeline": "zb_v"}


class Whole(nn.Module):
    """A block that is a unit as a whole."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).tanh()


class Writes(Whole):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean((0, 1)))
        return y


class WritesChoosing(Writes):
    """Cannot be traced without data."""

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().abs().amax() < 0:
            return x
        return super().forward(x)


class Reads(Whole):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.mean


class Model(nn.Module):
    """Blocks that hold one tensor, as a buffer or not."""

    def __init__(self, *kinds: type[Whole], buffer: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(WIDTH, CLASSES)
        mean = torch.zeros(WIDTH, dtype=torch.float64)
        for block in self.blocks:
            if type(block) is not Whole:
                if buffer:
                    block.register_buffer("mean", mean)
                else:
                    block.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Normed(Whole):
    """Has the norm of another block, and is not split: its code reads values."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.norm(y.transpose(1, 2)).transpose(1, 2) if y.detach().abs().amax() > 0 else y


class SharedNorm(Model):
    """Two blocks with one batch norm."""

    def __init__(self) -> None:
        super().__init__(*[Whole] * 6, buffer=True)
        norm = nn.BatchNorm1d(WIDTH)
        self.blocks[0], self.blocks[2] = Normed(norm), Normed(norm)


def recipe_of(build: Callable[[], nn.Module]) -> Recipe:
    return Recipe(build=build, batch=features, loss=classify)


MODELS = {
    "written first": lambda: Model(Writes, Whole, Reads, Whole, Whole, Whole, buffer=True),
    "read first": lambda: Model(Reads, Whole, Whole, Writes, Whole, Whole, buffer=True),
    "written by a module that reads values": lambda: Model(Reads, WritesChoosing, *[Whole] * 3, buffer=True),
    "a shared batch norm": SharedNorm,
    "no buffer, written first": lambda: Model(Writes, Reads, *[Whole] * 3, buffer=False),
}


KEPT = [
    ("written first", ""),
    ("read first", "V"),
    ("written by a module that reads values", "V"),
    ("a shared batch norm", ""),
    ("no buffer, written first", "V"),
]


@pytest.mark.parametrize(("name", "shape"), KEPT)
def test_units_that_share_what_one_of_them_changes_share_a_stage(name, shape):
    """The other found what it had at first, where it was on another stage."""
    case = Case(config=V if shape else CONFIG, iterations=[Iteration(), EVALUATION, Iteration()])
    assert run_ranks(differences, 2, recipe_of(MODELS[name]), case) == [[], []]


def apart(model: nn.Module) -> nn.Module:
    for number, block in enumerate(model.blocks):
        sw.set_partition(block, int(number > 1))
    sw.set_partition(model.head, 1)
    return model


BY_HAND = {**CONFIG, "auto_partition": False, "default_partition": 0}


class Frozen(SharedNorm):
    """The shared norm stays as it is."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.blocks[0].norm.eval()
        return self


def test_what_nobody_changes_may_be_placed_apart():
    case = Case(config=BY_HAND, iterations=[Iteration()] * 2)
    assert run_ranks(differences, 2, recipe_of(lambda: apart(Frozen())), case) == [[], []]


def test_code_between_units_cannot_read_what_a_unit_writes():
    class Between(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x - self.blocks[0].mean)

    recipe = recipe_of(lambda: Between(Writes, Whole, Whole, Whole, buffer=False))
    with pytest.raises(RanksFailedError, match=r"blocks.0 writes to a tensor that is no buffer"):
        run_ranks(differences, 2, recipe, Case(config=CONFIG, iterations=[Iteration()]))
