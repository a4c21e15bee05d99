"""Counts and lists that code between units keeps in one place for all, with several stages a rank."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH

import shardwright.torch as sw
from shardwright.errors import TraceError
from shardwright.testing import run_ranks

# Each rank has two stages, and goes on with other microbatches in between.
CONFIG = {
    "microbatches": 4,
    "profile": "estimated",
    "pipeline_parallel_degree": 2,
    "auto_partition": False,
    "default_partition": 0,
}
CASE = Case(config=CONFIG, iterations=[Iteration()])


class Block(nn.Module):
    """A unit as a whole."""

    notes: Any

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).tanh()


class Notes:
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.skips: list[Tensor] = []
        self.nested = {"depth": {"count": 0}}


class NotesModule(Notes, nn.Module):
    pass


class Model(nn.Module):
    """Six blocks and a head; code between them uses the notes."""

    def __init__(self, make: Callable[[], Any] = Notes):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.notes = make()
        for block, rank in zip(self.blocks, (0, 0, 1, 1, 0, 0), strict=True):
            sw.set_partition(block, rank)
        sw.set_partition(self.head, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.notes.count = 0
        for number, block in enumerate(self.blocks):
            x = block(self.between(x, number))
        return self.head(x)

    def between(self, x: Tensor, number: int) -> Tensor:
        self.notes.count += 1
        return x / self.notes.count


class PushesAndPops(Model):
    def between(self, x: Tensor, number: int) -> Tensor:
        if number < 3:
            self.notes.skips.append(x)
            return x
        return x + self.notes.skips.pop()


class CountsDeepInside(Model):
    def between(self, x: Tensor, number: int) -> Tensor:
        counts = self.notes.nested["depth"]
        counts["count"] = number + 1
        return x / counts["count"]


class LeavesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.notes.kept = x
        return super().forward(x)


class Finds(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.notes.kept


class HandsOnItsInput(Model):
    """What the first block is given no unit has made."""

    def __init__(self, make: Callable[[], Any]):
        super().__init__(make)
        self.blocks[0], self.blocks[5] = LeavesItsInput(), Finds()
        self.blocks[0].notes = self.blocks[5].notes = self.notes

    def between(self, x: Tensor, number: int) -> Tensor:
        return x


class CollectsFeatures(Model):
    """It writes what modules give into dictionaries and objects, those of the microbatch before or none."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Any] = {}
        self.nested: dict[str, dict[str, Any]] = {"features": {}}
        self.space = SimpleNamespace()

    def between(self, x: Tensor, number: int) -> Tensor:
        self.features[str(number)] = self.space.last = x
        self.nested["features"][str(number)] = x.detach().mean()  # which nobody reads
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits + self.space.last.mean() + sum(made.mean() for made in self.features.values())


class KeepsAList(Model):
    """It gets longer with every microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.notes.skips.append(logits.detach())
        return logits * len(self.notes.skips)


MODELS = [
    CollectsFeatures,
    lambda: Model(Notes),
    lambda: Model(NotesModule),
    lambda: PushesAndPops(Notes),
    lambda: HandsOnItsInput(NotesModule),
]


def differences_of_all() -> list[str]:
    found = []
    for number, build in enumerate(MODELS):
        recipe = Recipe(build=build, batch=features, loss=classify)
        found += [f"model {number}: {line}" for line in differences(recipe, CASE)]
    for build, attribute in ((CountsDeepInside, "depth"), (KeepsAList, "skips")):
        try:
            differences(Recipe(build=build, batch=features, loss=classify), CASE)
            found.append(f"{build.__name__} was not refused")
        except TraceError as error:
            if f"the attribute {attribute} of what the model holds" not in str(error):
                found.append(str(error))
    return found


@pytest.mark.thorough
def test_each_microbatch_finds_its_own_counts_and_lists():
    """It went on with those of the microbatch that had come in between."""
    assert run_ranks(differences_of_all, 2) == [[], []]
