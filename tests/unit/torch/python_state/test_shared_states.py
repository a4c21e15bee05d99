"""Which units a trace binds together because of what they leave in modules, objects and lists they share."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.model_graph import ModelGraph
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.trace import trace_step

WIDTH = 4


class Notes:
    """What blocks share: an object of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.skips: list[Any] = []
        self.losses: dict[Any, Any] = {}
        self.nested = {"depth": {"count": 0}}
        self.layers: list[Any] = []
        self.count = 0
        self.kept: Any = None


class NotesModule(Notes, nn.Module):
    """The same as a module that several units hold."""


class Block(nn.Linear):
    """A unit."""

    notes: Any

    def __init__(self, use: Callable[[Any, Tensor, Tensor], Tensor | None]):
        super().__init__(WIDTH, WIDTH)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        y = x + super().forward(x).tanh()
        used = self.use(self, x, y)
        return y if used is None else used


class Choosing(Block):
    """Cannot be traced without data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.detach().abs().amax() >= 0 else x


def plain(block: Any, x: Tensor, y: Tensor) -> None:
    """Uses nothing."""


def push(block: Any, x: Tensor, y: Tensor) -> None:
    block.notes.skips.append(y)


def push_input(block: Any, x: Tensor, y: Tensor) -> None:
    block.notes.skips.append(x)


def pop(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return y + block.notes.skips.pop()


def pop_if_there(block: Any, x: Tensor, y: Tensor) -> Tensor | None:
    return y + block.notes.skips.pop() if block.notes.skips else None


def depth_by_list(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.notes.skips.append(1.0)
    return y / len(block.notes.skips)


def depth_by_nested(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.notes.nested["depth"]["count"] += 1
    return y / block.notes.nested["depth"]["count"]


def count(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.notes.count += 1
    return y / block.notes.count


def leave(block: Any, x: Tensor, y: Tensor) -> None:
    block.notes.kept = y


def find(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return y + block.notes.kept


def loss_of_its_own(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.notes.losses[id(block)] = y.square().mean()
    return y * block.notes.losses[id(block)]


def table(block: Any, x: Tensor, y: Tensor) -> Tensor:
    if "table" not in block.notes.losses:
        block.notes.losses["table"] = torch.arange(WIDTH).float()
    return y + block.notes.losses["table"]


def own_number(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.notes.count = x.shape[0]
    return y / block.notes.count


def bound(notes: Any, *uses: Any, kind: type[Block] = Block) -> list[set[int]]:
    """Which blocks share a stage, when these come one after the other."""
    return bound_in(notes, [kind(use) for use in uses])


def bound_in(notes: Any, blocks: list[Block]) -> list[set[int]]:
    return [set(group.nodes) for group in graph_of(notes, blocks).together]


def reads_from(graph: ModelGraph, node: int, maker: int) -> bool:
    """Whether a node reads another value of one before than its result."""
    made = [value for value in graph.nodes[node].inputs if graph.values[value].producer == maker]
    return any(graph.values[value].position > 0 for value in made)


def graph_of(notes: Any, blocks: list[Block]) -> ModelGraph:
    model = nn.Sequential(*blocks)
    for number, block in enumerate(model):
        block.notes, block.number = notes, number
    unit_map = UnitMap.of(model, [str(number) for number in range(len(model))])
    for unit in unit_map.modules.values():
        intercept_calls(unit)
    before = dict(vars(notes)), list(notes.skips), dict(notes.losses)
    trace = trace_step(unit_map, lambda x: model(x), ((torch.zeros(3, WIDTH),), {}))
    assert (dict(vars(notes)), list(notes.skips), dict(notes.losses)) == before
    assert all(type(vars(notes)[key]) in (list, dict) for key in ("skips", "losses", "layers"))
    return trace.graph


@pytest.mark.parametrize(
    "make",
    [
        Notes,
    ],
)
def test_units_that_find_what_others_left_are_bound(make):
    """Another stage found an older number or tensor there, or none, and went on."""
    assert bound(make(), plain, push, plain, pop) == [{1, 3}]
    assert bound(make(), push_input, plain, pop_if_there, plain) == [{0, 2}]
    for use in (depth_by_list, depth_by_nested, count):
        assert set().union(*bound(make(), plain, use, use, use)) == {1, 2, 3}, use


@pytest.mark.parametrize("make", [NotesModule])
def test_so_are_units_that_cannot_be_traced_without_data(make):
    """They run on copies of what they hold."""
    for use in (depth_by_list, depth_by_nested, count):
        found = bound(make(), plain, use, use, use, kind=Choosing)
        assert set().union(*found) == {1, 2, 3}, use
    for use in (loss_of_its_own, table, own_number):
        assert bound(make(), use, use, use, kind=Choosing) == [], use
    blocks = [Block(plain), Block(push), Block(leave), Choosing(pop), Choosing(find)]
    graph = graph_of(make(), blocks)
    found = [set(group.nodes) for group in graph.together]
    assert {1, 3} in found
    assert {2, 4} in found or reads_from(graph, 4, 2)


class Lazy(Notes):
    """Computes something once, when it is asked for it."""

    @cached_property
    def scale(self) -> float:
        return len(self.nested) / 2


def scaled(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * block.notes.scale


def test_what_is_computed_once_and_kept_binds_nothing():
    assert bound(Lazy(), scaled, scaled, scaled) == []
