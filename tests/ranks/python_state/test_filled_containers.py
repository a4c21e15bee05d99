"""Lists, dictionaries and dataclasses that modules are given and change: what is in them is a result."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

APART = {
    "microbatches": 4,
    "profile": "estimated",
    "pipeline_parallel_degree": 2,
    "auto_partition": False,
    "default_partition": 0,
}


class Whole(nn.Module):
    """A block that is a unit as a whole: it has no modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor, container: Any) -> Tensor:
        return x + (x @ self.weight).tanh()


class Dense(Whole):
    """Adds what the block before it has put into a list, and puts there what it makes."""

    def forward(self, x: Tensor, container: list[Tensor]) -> Tensor:
        y = super().forward(x, container)
        if container:
            y = y + container[-1]
        container.append(y)
        return y


class Measuring(Whole):
    """Looks at how many there are of what is no tensor."""

    def forward(self, x: Tensor, container: list[float]) -> Tensor:
        container.append(1.0)
        return super().forward(x, container) / len(container)


class Numbering(Whole):
    def forward(self, x: Tensor, container: dict[str, int]) -> Tensor:
        container["depth"] = container.get("depth", 0) + 1
        return super().forward(x, container) / container["depth"]


class Advances(Whole):
    """Returns what it was given, and leaves its result in the dictionary."""

    def forward(self, x: Tensor, container: dict[str, Any]) -> Tensor:
        container["x"] = super().forward(container["x"] + x, container)
        return x


class Popping(Whole):
    """The first three put a skip aside, and the others take it."""

    number = 0

    def forward(self, x: Tensor, container: list[Tensor]) -> Tensor:
        y = super().forward(x, container)
        if self.number < 3:
            container.append(x)
            return y
        return y + container.pop()


class Choosing(Dense):
    """Cannot be traced without data."""

    def forward(self, x: Tensor, container: list[Tensor]) -> Tensor:
        return super().forward(x, container) if x.detach().abs().amax() >= 0 else x


@dataclass
class Notes:
    depth: int = 0
    seen: dict[str, list[Tensor]] = field(default_factory=lambda: {"means": []})


class Noting(Whole):
    def forward(self, x: Tensor, container: Notes) -> Tensor:
        container.depth += 1
        y = super().forward(x, container) / container.depth
        container.seen["means"].append(y.mean())
        return y


class Filling(nn.Module):
    """Blocks that get a new container each time; the last two are on the second stage."""

    def __init__(self, make: Callable[[], Any], block: type[Whole], num_blocks: int = 6):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.make = make
        for number, layer in enumerate(self.blocks):
            layer.number = number
            sw.set_partition(layer, int(number >= num_blocks - 2))
        sw.set_partition(self.head, 1)

    def forward(self, x: Tensor) -> Tensor:
        container = self.make()
        for block in self.blocks:
            x = block(x, container)
        return self.head(self.at_end(x, container))

    def at_end(self, x: Tensor, container: Any) -> Tensor:
        return x


class Summing(Filling):
    """Code between units reads what they have left: auxiliary losses and counts."""

    def at_end(self, x: Tensor, container: Notes) -> Tensor:
        return x * (1 + sum(container.seen["means"])) / (1 + container.depth)


class ReadsLast(Filling):
    def at_end(self, x: Tensor, container: dict[str, Any]) -> Tensor:
        return x + container["x"]


MODELS = {
    "an entry of a dictionary": lambda: Filling(dict, Numbering),
    "what was free": lambda: ReadsLast(lambda: {"x": torch.ones(1, WIDTH, dtype=torch.float64)}, Advances),
    "skips": lambda: Filling(list, Popping),
    "modules that read values": lambda: Filling(list, Choosing),
    "a dataclass": lambda: Summing(Notes, Noting),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *(("an entry of a dictionary", "full"), ("what was free", "full")),
        *(("skips", "none"), ("a dataclass", "none")),
        ("modules that read values", "full"),
    ],
)
def test_stages_find_what_others_have_put_into_a_container(name, recompute):
    """They shared a stage, and code between units could not look there."""
    config = {**APART, "activation_checkpointing": recompute}
    recipe = Recipe(build=MODELS[name], batch=features, loss=classify)
    case = Case(config=config, iterations=[Iteration(), Iteration(train=False), Iteration(batch_size=7)])
    assert run_ranks(differences, 2, recipe, case) == [[], []]


SIZES: list[float] = []


def test_a_list_that_stays_is_refused():
    """It is longer in every microbatch, and other ranks go by the trace."""
    recipe = Recipe(build=lambda: Filling(lambda: SIZES, Measuring), batch=features, loss=classify)
    with pytest.raises(RanksFailedError, match="leaves other entries in a list or a dictionary") as caught:
        run_ranks(differences, 2, recipe, Case(config=APART, iterations=[Iteration()]))
    assert "test_filled_containers.py" in str(caught.value)
