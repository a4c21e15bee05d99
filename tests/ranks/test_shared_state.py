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


class WritesUnderAnotherName(Whole):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.mean.data[1:].copy_(y.detach().mean((0, 1))[1:])
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
    "written under another name": lambda: Model(Reads, WritesUnderAnotherName, *[Whole] * 3, buffer=True),
    "written by a module that reads values": lambda: Model(Reads, WritesChoosing, *[Whole] * 3, buffer=True),
    "a shared batch norm": SharedNorm,
}


@pytest.mark.parametrize("config", [CONFIG, V], ids=["", "V"])
@pytest.mark.parametrize("name", MODELS)
def test_units_that_share_what_one_of_them_changes_share_a_stage(name, config):
    """The other found what it had at first, where it was on another stage."""
    case = Case(config=config, iterations=[Iteration(), EVALUATION, Iteration()])
    assert run_ranks(differences, 2, recipe_of(MODELS[name]), case) == [[], []]


@pytest.mark.parametrize("name", ["written first", "read first", "a shared batch norm"])
def test_they_cannot_be_placed_apart(name):
    def apart() -> nn.Module:
        model = MODELS[name]()
        for number, block in enumerate(model.blocks):
            sw.set_partition(block, int(number > 1))
        sw.set_partition(model.head, 1)
        return model

    config = {**CONFIG, "auto_partition": False, "default_partition": 0}
    message = "the parameter or buffer blocks.0.* is changed in place by the step function or by a module"
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(differences, 2, recipe_of(apart), Case(config=config, iterations=[Iteration()]))


@pytest.mark.parametrize("kind", [Writes, WritesUnderAnotherName, WritesChoosing])
def test_a_shared_tensor_that_a_unit_changes_must_be_a_buffer(kind):
    recipe = recipe_of(lambda: Model(Reads, Whole, kind, Whole, buffer=False))
    with pytest.raises(RanksFailedError, match=r"blocks.2 writes to a tensor .* attribute mean of blocks.0"):
        run_ranks(differences, 2, recipe, Case(config=CONFIG, iterations=[Iteration()]))
