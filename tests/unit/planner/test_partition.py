"""Cutting the chain: literals, and brute force on small chains."""

import collections
import itertools

import numpy as np
import pytest
from graphs import GraphBuilder, chain_graph, profile_of
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cluster import Link
from shardwright.costs.chain import split
from shardwright.errors import PlanError
from shardwright.model_graph import ModelGraph
from shardwright.planner.cuts import manual_stages
from shardwright.planner.model_chain import build_chain
from shardwright.planner.objective import Demands, Floats, build_objective, build_tables


def all_cuts(num_atoms: int, num_stages: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, num_atoms), num_stages - 1)
    return [(0, *cuts, num_atoms) for cuts in inner]


def stage_costs(cuts: tuple[int, ...], tables: list[Floats]) -> list[float]:
    return [float(table[i, j]) for table, (i, j) in zip(tables, itertools.pairwise(cuts), strict=True)]


@given(st.data())
def test_split_agrees_with_brute_force(data: st.DataObject) -> None:
    num_atoms = data.draw(st.integers(1, 8))
    num_stages = data.draw(st.integers(1, num_atoms))
    # Any costs at all: different for each stage, not monotone, partly forbidden.
    entry = st.one_of(st.integers(0, 9).map(float), st.just(float("inf")))
    tables = []
    for _ in range(num_stages):
        size = num_atoms + 1
        rows = data.draw(
            st.lists(st.lists(entry, min_size=size, max_size=size), min_size=size, max_size=size)
        )
        table = np.array(rows)
        table[np.tri(size, dtype=bool)] = np.inf
        tables.append(table)
    found = split(num_atoms, num_stages=num_stages, cost_of_stage=lambda stage: tables[stage])
    ways = [stage_costs(cuts, tables) for cuts in all_cuts(num_atoms, num_stages)]
    # The dearest stage first, then the sum, then the most even.
    best = min((max(way), sum(way), sum(cost * cost for cost in way)) for way in ways)
    if np.isinf(best[0]):
        assert found is None
        return
    assert found is not None
    way = stage_costs(found, tables)
    assert (max(way), sum(way), sum(cost * cost for cost in way)) == best


@given(
    costs=st.lists(st.floats(0.01, 10), min_size=2, max_size=9),
    num_stages=st.integers(2, 4),
    limit=st.integers(500, 20_000),
    flights=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_memory_limits_hold(costs: list[float], num_stages: int, limit: int, flights: list[int]) -> None:
    classes = {f"c{i}": (cost, 2 * cost) for i, cost in enumerate(costs)}
    graph = chain_graph(len(costs), classes=list(classes), output_bytes=0)
    profile = profile_of({**classes, "embed": (0.1, 0.2), "head": (0.1, 0.2)}, work_bytes=64)
    objective = build_objective(
        build_tables(build_chain(graph, profile)), Demands(limit_bytes=limit, recompute="none")
    )
    tables = [objective.cost(flights[stage]) for stage in range(num_stages)]
    num_atoms = len(costs) + 2
    found = split(num_atoms, num_stages=num_stages, cost_of_stage=lambda stage: tables[stage])

    def peak(stage: int, i: int, j: int) -> int:
        return (j - i) * (4 * 400 + flights[stage] * 1000) + 64

    fitting = [
        cuts
        for cuts in all_cuts(num_atoms, num_stages)
        if all(peak(s, i, j) <= limit for s, (i, j) in enumerate(itertools.pairwise(cuts)))
    ]
    assert (found is None) == (not fitting)
    assert found is None or found in fitting


def test_a_thousand_atoms_on_64_stages_look_at_each_table_a_few_times() -> None:
    """One reduction over it for each stage; seconds are in ``benchmarks/planning.py``."""
    objective = build_objective(
        build_tables(build_chain(chain_graph(998, tied=True), profile_of())),
        Demands(limit_bytes=10**9),
        link=Link(latency_s=1e-5, bandwidth_Bps=1e9),
    )
    cost = objective.cost(1)
    looks = collections.Counter[int]()

    def cost_of_stage(stage: int) -> Floats:
        looks[stage] += 1
        return cost

    assert split(1000, num_stages=64, cost_of_stage=cost_of_stage) is not None
    assert sorted(looks) == list(range(64))
    assert max(looks.values()) <= 3


def test_manual_placement_on_a_rank_that_does_not_exist() -> None:
    with pytest.raises(PlanError, match=r"partition 2, but there are 2: partitions run from 0 to 1"):
        manual_stages([0, 2], num_ranks=2)


CLASSES = {"x": (1.0, 2.0), "y": (0.25, 0.75), "z": (3.0, 4.0)}
PROFILE = profile_of(CLASSES)


@st.composite
def graphs(draw: st.DrawFn) -> ModelGraph:
    """Units and operations that read any earlier values, with shared parameters."""
    builder = GraphBuilder()
    names = [builder.parameter(f"w{i}", 4 * (i + 1), requires_grad=i % 3 > 0) for i in range(4)]
    values: list[int] = []
    for index in range(draw(st.integers(1, 9))):
        inputs = draw(st.lists(st.sampled_from(values), max_size=3, unique=True)) if values else []
        arguments = {
            "output_bytes": 4 * draw(st.integers(1, 20)),
            "parameters": draw(st.lists(st.sampled_from(names), max_size=2, unique=True)),
            "requires_grad": draw(st.booleans()),
        }
        if draw(st.booleans()) or not values:
            name = draw(st.sampled_from([f"u{index}", "shared"]))
            cost_class = draw(st.sampled_from(sorted(CLASSES)))
            mutates = name == "shared" and draw(st.booleans())
            values.append(
                builder.unit(name, inputs, cost_class=cost_class, mutates_buffers=mutates, **arguments)
            )
        else:
            values.append(builder.op(f"op{index}", inputs, saved_bytes=index, **arguments))
    return builder.graph(loss=values[-1])
