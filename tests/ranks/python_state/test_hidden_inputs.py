"""Modules that hand on tensors and counters by other ways than arguments and results."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.trace import trace_step

CONFIG = {"microbatches": 4, "profile": "estimated"}
SHARED = "has left in an object, a list or a variable"


class Notes:
    """An object of the user's own, which is no container."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.depth = 0
        self.width = 0


class Whole(nn.Module):
    """A block that is a unit as a whole: it has no modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor, notes: Any = None) -> Tensor:
        return x + (x @ self.weight).tanh()


class Noting(Whole):
    """Takes part in a value residual: what the first block computes is added in all of them."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        y = super().forward(x)
        if notes.first is None:
            notes.first = y
        return y + 0.5 * notes.first


class Choosing(Noting):
    """Cannot be traced without data."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        if x.detach().abs().amax() < 0:
            return x
        return super().forward(x, notes)


class Counting(Whole):
    """Scales by how deep it is, which all blocks count together."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        notes.depth += 1
        return super().forward(x) / notes.depth**0.5


class SettingFirst(Whole):
    """Reads what it has written itself."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        notes.width = x.shape[-1]
        return super().forward(x) / notes.width


class OneEach(Whole):
    """Looks at its own entry alone, like the blocks of a model with a cache of keys and values."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        own = vars(notes).setdefault("entries", {}).setdefault(id(self), Notes())
        own.first = super().forward(x)
        return own.first + 1.0


class Handed(nn.Module):
    """Blocks that get a new object each time."""

    def __init__(self, *blocks: type[Whole]):
        super().__init__()
        self.blocks = nn.ModuleList(block() for block in blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        for block in self.blocks:
            x = block(x, notes)
        return self.head(x)


class Held(Handed):
    """Every block holds the object."""

    def __init__(self, *blocks: type[Whole]):
        super().__init__(*blocks)
        self.notes = Notes()
        for block in self.blocks:
            block.notes = self.notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.__init__()  # type: ignore[misc]
        for block in self.blocks:
            x = block(x, block.notes)
        return self.head(x)


FOUND: dict[str, Tensor] = {}


class Leaving(Whole):
    """Puts what it makes where everybody finds it."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        y = super().forward(x)
        FOUND["mean"] = y.mean(0)
        return y


class Finding(Whole):
    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        return super().forward(x) + FOUND["mean"].tanh()


def recipe_of(build: Callable[[], nn.Module]) -> Recipe:
    return Recipe(build=build, batch=features, loss=classify)


TOGETHER = {
    "a tensor in an object": lambda: Handed(Noting, Noting, Whole, Whole, Whole),
    "from a module that reads values": lambda: Handed(Whole, Whole, Whole, Noting, Choosing),
    "a count in an object": lambda: Handed(Whole, Whole, Counting, Counting, Whole, Whole),
    "a count in an object that blocks hold": lambda: Held(Counting, Counting, Whole, Whole, Whole),
    "a global": lambda: Handed(Leaving, Whole, Finding, Whole, Whole, Whole),
}
FREE = {
    "reads what it wrote": lambda: Handed(*[SettingFirst] * 6),
    "an entry each": lambda: Handed(*[OneEach] * 6),
}


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        *(("a tensor in an object", "auto"), ("from a module that reads values", "zb_v")),
        *(("a count in an object that blocks hold", "zb_v"), ("an entry each", "auto")),
    ],
)
def test_modules_that_share_an_object_share_a_stage(name, pipeline):
    config = {**CONFIG, "pipeline": pipeline, "pipeline_parallel_degree": 2}
    case = Case(config=config, iterations=[Iteration()] * 2)
    assert run_ranks(differences, 2, recipe_of({**TOGETHER, **FREE}[name]), case) == [[], []]


APART = {
    "a tensor in an object": lambda: Handed(*[Noting] * 5),
    "a global": lambda: Handed(Leaving, Whole, Whole, Whole, Finding),
}


def halves(model: nn.Module) -> nn.Module:
    """Places the last block and the head on the second stage."""
    sw.set_partition(model.blocks[-1], 1)
    sw.set_partition(model.head, 1)
    return model


@pytest.mark.parametrize("name", APART)
def test_where_they_cannot_the_error_says_what_they_share(name):
    config = {**CONFIG, "pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}
    recipe = recipe_of(lambda: halves(APART[name]()))
    with pytest.raises(RanksFailedError, match=SHARED) as caught:
        run_ranks(differences, 2, recipe, Case(config=config, iterations=[Iteration()]))
    assert "test_hidden_inputs.py" in str(caught.value)


def test_traces_leave_no_tensors_behind():
    """The history of a trace held its batch for as long as the process lived."""

    def job() -> list[int]:
        model = Handed(*[OneEach] * 3).double()
        unit_map = UnitMap.of(model, ["blocks.0", "blocks.1", "blocks.2", "head"])
        for unit in unit_map.modules.values():
            intercept_calls(unit)
        counts = []
        for length in range(3, 9):
            batch = (torch.zeros(2, length, WIDTH, dtype=torch.float64),)
            trace_step(unit_map, model, (batch, {}))
            del batch
            gc.collect()
            counts.append(sum(type(item) is Tensor for item in gc.get_objects()))  # with data
        return counts

    (counts,) = run_ranks(job, 1)
    assert len(set(counts[1:])) == 1, counts
