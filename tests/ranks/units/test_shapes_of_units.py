"""A unit's output has the shape that the trace says, on whichever stage it is read."""

from typing import Any

import pytest
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case
from zoo import features
from zoo_modules import WIDTH, Stack

from shardwright.testing import RanksFailedError, run_ranks

CONFIG = {"microbatches": 4, "profile": "estimated"}


class KeepsLarge(nn.Module):
    """How many rows come out depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).flatten(0, 1)
        return y[y[:, 0] > 0]


class ShapeFromValues(Stack):
    """Both the module and its reader are on the last stage: the shape never crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.some = KeepsLarge()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.some(x).square().mean(0)


class CountsOnAnotherStage(ShapeFromValues):
    """The first stage makes rows, and sums them; the last one asks how many there were."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.some(x)
        x = x + rows.sum(0) / 10
        for block in self.blocks:
            x = block(x)
        return x / rows.shape[0]


def squared(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()


def run(build: type[nn.Module]) -> list[Any]:
    recipe = Recipe(build=build, batch=features, loss=squared)
    case = Case(config={**CONFIG, "pipeline": "1f1b"}, iterations=(Iteration(), Iteration()))
    return run_ranks(differences_by_case, 2, recipe, {"1f1b": case}, timeout_s=60)


@pytest.mark.parametrize(
    "build",
    [
        ShapeFromValues,
    ],
)
def test_shapes_may_follow_from_values(build):
    assert run(build) == [{}] * 2


def test_a_shape_that_other_stages_would_take_from_the_trace_is_refused():
    with pytest.raises(RanksFailedError) as caught:
        run(CountsOnAnotherStage)
    assert "module KeepsLarge gave a tensor of shape" in str(caught.value)
    assert "test_shapes_of_units.py:" in str(caught.value)
