"""Generators of random numbers that are made inside of a step function: which units must share a stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import TraceError
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.tracing.working_memory import WorkingMemory

WIDTH = 4


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return super().forward(x) + torch.randn(x.shape, generator=generator)


def traced(step: Callable[[list[Any], Tensor], Tensor]) -> Trace:
    blocks = nn.ModuleList([Noisy(), nn.Linear(WIDTH, WIDTH), Noisy()])
    unit_map = UnitMap.of(blocks, ["0", "1", "2"])
    for unit in unit_map.modules.values():
        intercept_calls(unit)
    return trace_step(unit_map, lambda x: step(list(blocks), x), ((torch.zeros(2, WIDTH),), {}))


def bound(step: Callable[[list[Any], Tensor], Tensor]) -> list[tuple[int, ...]]:
    return [group.nodes for group in traced(step).graph.together]


def handed_on(blocks: list[Any], x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return blocks[2](blocks[1](blocks[0](x, generator)), generator)


def drawn_from_first(blocks: list[Any], x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = x + torch.randn(x.shape, generator=generator)
    return blocks[1](blocks[0](x, generator))


def seeded_again(blocks: list[Any], x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = blocks[1](blocks[0](x, generator))
    return blocks[2](x, generator.manual_seed(3))


def one_each(blocks: list[Any], x: Tensor) -> Tensor:
    x = blocks[1](blocks[0](x, torch.Generator().manual_seed(3)))
    return blocks[2](x, torch.Generator().manual_seed(3))


def drawn_from_last(blocks: list[Any], x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    y = blocks[0](x, generator)
    return blocks[1](y + torch.randn(x.shape, generator=generator))


OF_THE_SCRIPT = torch.Generator().manual_seed(1)


def test_a_generator_of_the_script_is_no_part_of_the_step():
    """Its state was read by an operation that the trace had, and no microbatch."""

    def step(blocks: list[Any], x: Tensor) -> Tensor:
        assert OF_THE_SCRIPT.initial_seed() == 1
        return blocks[1](x)

    (only,) = traced(step).steps
    assert isinstance(only.func, nn.Linear)


def test_who_goes_on_with_a_generator_is_where_it_was_left():
    """Another stage began with the seed."""
    assert bound(handed_on) == [(0, 2)]
    for step in (drawn_from_first, seeded_again, one_each):
        assert bound(step) == [], step


def test_code_between_units_cannot_go_on_with_it():
    with pytest.raises(TraceError, match=r"made in the step function, and from which a module has drawn"):
        traced(drawn_from_last)


class Seeds(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.seed()
        return super().forward(x)


@pytest.mark.parametrize("memory", [None, {}])
def test_a_rank_that_counts_memory_sees_the_seeds_that_others_see(memory: dict[str, WorkingMemory] | None):
    """Counting set the generator before, and so Reformer's first rank went on where the second refused."""
    layer = Seeds(WIDTH, WIDTH)
    unit_map = UnitMap.of(nn.ModuleList([layer]), ["0"])
    intercept_calls(layer)
    trace = trace_step(unit_map, lambda x: layer(x).sum(), ((torch.zeros(2, WIDTH),), {}), memory=memory)
    assert "test_generators_of_a_step.py" in trace.random.set_at
