"""Weights that are no parameters: hooks, parents and other networks compute them for each call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transparency import Case, Iteration, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH

import shardwright.torch as sw
from choices import thorough
from shardwright.testing import RanksFailedError, run_ranks

ITERATIONS = (Iteration(), Iteration(train=False), Iteration(batch_size=7))


def case(pipeline: str, **settings: Any) -> Case:
    config = {"microbatches": 4, "profile": "estimated", "pipeline": pipeline, **settings}
    return Case(config=config, iterations=ITERATIONS)


class Layers(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Hyper(Layers):
    """One network computes the weights of the others from the batch, before the first of them is called."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            del layer.weight
            layer.weight = None
        self.code, self.make = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(self.code(x).mean((0, 1))).view(WIDTH, WIDTH) / WIDTH**0.5
        for layer in self.layers:
            layer.weight = weight + weight.T
        return super().forward(x)


class Tied(Layers):
    """A hook ties the weight of the last layer to that of the first."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[-1].weight
        self.register_forward_pre_hook(
            lambda model, args: setattr(model.layers[-1], "weight", model.layers[0].weight)
        )


class Cached(Layers):
    """Uses each weight twice, and computes it once."""

    def __init__(self) -> None:
        super().__init__(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return super().forward(x)


def recomputed(layer: nn.Module) -> nn.Module:
    sw.set_activation_checkpointing(layer)
    return layer


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scales = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), []

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight * self.scales[0]).tanh()


class Lists(Layers):
    """Code between units puts into a list what a unit reads there: both go to one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.scale = Listed(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.listed.scales = [self.scale.exp()]
        return self.head(self.listed(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: Layers(spectral_norm),
    "hyper": Hyper,
    "tied": Tied,
    "recomputed": lambda: Layers(lambda: recomputed(spectral_norm())),
    "cached": Cached,
    "lists": Lists,
}
RUNS = [
    ("spectral_norm", "1f1b"),
    thorough("hyper", "zb_v"),
    thorough("tied", "1f1b"),
    ("recomputed", "1f1b"),  # the hook ran in the backward, too
    ("cached", "zb_v"),
    thorough("lists", "1f1b"),
]


def check(model: Callable[[], nn.Module], case: Case, ranks: int = 2) -> None:
    recipe = Recipe(build=model, batch=features, loss=classify)
    assert run_ranks(differences_by_case, ranks, recipe, {"": case}, timeout_s=60) == [{}] * ranks


@pytest.mark.parametrize(("name", "pipeline"), RUNS)
def test_a_computed_weight_is_one_more_argument(name, pipeline):
    """The graph did not know that a unit reads such an attribute."""
    check(MODELS[name], case(pipeline))


class Replacing(Layers):
    """Leaves computed tensors in the place of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer._parameters["weight"] = 0.5 * self.own
            x = torch.tanh(layer(x))
        return self.head(x)


def test_a_parameter_is_not_replaced_for_good():
    """It died in the middle of the step, on one rank."""
    with pytest.raises(RanksFailedError, match=r"in the place of the parameter layers\.0\.weight"):
        check(Replacing, case("1f1b"))
