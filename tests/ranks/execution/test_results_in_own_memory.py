"""Units that return memory of their own, and use it again in the next microbatch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import WIDTH, Stack

from shardwright.testing import run_ranks

V = Case(config={"microbatches": 4, "profile": "estimated", "pipeline": "zb_v"}, iterations=[Iteration()] * 2)


class Centre(nn.Linear):
    """Returns its running mean; on random data, if it looks at values."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.looks = looks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(F.linear(x, self.weight, self.bias))
        if self.looks and y.mean() > 2:
            y = y / 2
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        return y, self.mean


class UsesMeansLater(Stack):
    """One of the means is also changed between units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Centre(), Centre(looks=True), Centre()

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.first(x)
        x, second = self.second(x)
        x, third = self.third(x)
        if self.training:
            third.mul_(0.5)
        for block in self.blocks:
            x = block(x)
        return self.head(x - first + second * third)


@pytest.mark.parametrize(
    "build",
    [
        UsesMeansLater,
    ],
)
def test_what_the_next_microbatch_overwrites(build):
    """The next stage of the same rank was given what the next microbatch had left; backwards failed."""
    assert run_ranks(differences, 2, Recipe(build=build, batch=features, loss=classify), V) == [[], []]
