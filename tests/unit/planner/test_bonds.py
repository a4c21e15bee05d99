"""Which calls must share a stage, for graphs built by hand."""

from dataclasses import replace

import pytest
from graphs import GraphBuilder, profile_of

from shardwright.model_graph import ModelGraph, Together
from shardwright.planner.chain import Bond, Chain
from shardwright.planner.model_chain import build_chain

PROFILE = profile_of()


def group(*nodes: int, one_rank: bool = False) -> Together:
    return Together(nodes, what="a region", line="model.py:3", why="why", remedy="do", one_rank=one_rank)


def blocks(number: int, *, op_after: int | None = None) -> ModelGraph:
    """A chain of units; after one of them comes an operation, which the next unit reads."""
    builder = GraphBuilder()
    value = builder.unit("h.0")
    for index in range(1, number):
        if index - 1 == op_after:
            value = builder.op("mul", [value])
        value = builder.unit(f"h.{index}", [value])
    return builder.graph(loss=value)


def chain_of(graph: ModelGraph, *groups: Together) -> Chain:
    return build_chain(replace(graph, together=groups), PROFILE)


def test_units_of_a_group_and_all_between_share_a_stage() -> None:
    chain = chain_of(blocks(6), group(1, 3))
    assert chain.starts == (0, 1, 4, 5, 6)
    always, one_rank = chain.bonds
    assert always == Bond(1, 3, "a region at model.py:3", "do")
    assert one_rank == replace(always, one_rank=True)


def test_an_operation_moves_to_its_group_and_binds_the_unit_that_reads_it() -> None:
    # Nodes: h.0, h.1, mul (at home with h.1), h.2, h.3, h.4.
    assert chain_of(blocks(5, op_after=1), group(2, 4)).starts == (0, 1, 2, 4, 5)


def test_an_operation_that_only_later_units_read_binds_nobody() -> None:
    builder = GraphBuilder()
    first = builder.unit("h.0")
    moved = builder.op("mean", [first])
    middle = builder.unit("h.1", [first])
    last = builder.unit("h.2", [middle])
    end = builder.op("add", [last, moved])
    chain = chain_of(builder.graph(loss=end), group(1, 3))
    assert chain.num_atoms == 3
    # The rank of h.2 must not have gone on to it when h.1 comes, so h.1 is not on another stage of it.
    assert chain.bound(stages_per_rank=2).starts == (0, 1, 3)


def test_what_moves_takes_along_what_rests_on_it_also_into_other_groups() -> None:
    builder = GraphBuilder()
    value = builder.unit("h.0")
    first = builder.op("mul", [value])  # node 1, moves to h.2
    second = builder.op("add", [first])  # node 2, so does this one, and with it the other group
    for index in range(1, 4):
        value = builder.unit(f"h.{index}", [value])  # nodes 3 to 5
    end = builder.op("sum", [value, second])
    chain = chain_of(builder.graph(loss=end), group(1, 4), group(2, 3))
    assert chain.starts == (0, 1, 3, 4)  # h.1 is in the group of what has moved to h.2


@pytest.mark.parametrize(("stages_per_rank", "starts"), [(1, (0, 1, 2, 3, 4)), (2, (0, 3, 4))])
def test_a_rank_with_several_stages_computes_an_operation_where_it_has_got_to(
    stages_per_rank: int, starts: tuple[int, ...]
) -> None:
    builder = GraphBuilder()
    start = value = builder.unit("h.0")
    for index in range(1, 3):
        value = builder.unit(f"h.{index}", [value])
    late = builder.op("mul", [start])  # node 3: its home is h.0, or where the rank of h.0 has got to
    value = builder.unit("h.3", [value, late])
    chain = chain_of(builder.graph(loss=value), group(0, 3))
    assert chain.bound(stages_per_rank=stages_per_rank).starts == starts
