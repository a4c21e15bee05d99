"""Nodes of several kinds: blocks are dealt by how fast they are, and by their memory."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from graphs import convolutional_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.catalogue import Transformer, find_architecture
from shardwright.cluster import parse_inventory
from shardwright.costs import (
    KindOfRank,
    Options,
    Placement,
    Rates,
    Shape,
    calibration_of,
    chain_prices,
    rank_bytes,
    step_seconds,
    transformer_prices,
)
from shardwright.costs.block import block_seconds, head_seconds
from shardwright.costs.kinds import stages_alike
from shardwright.costs.memory import BF16, stage_bytes
from shardwright.planner.ways import Task, search
from shardwright.planner.ways.answers import reasons, sensitivities

A100 = Rates(flops_per_s=312e12, memory_Bps=2e12, link_Bps=300e9, network_Bps=100e9, per_node=8.0)
REACHED = calibration_of("A100", "megatron").efficiencies
MODEL = Transformer(name="m", layers=12, hidden=2048, heads=16, vocabulary=32000, sequence=1024, ffn=8192)
SHAPE = Shape.of(MODEL)
PLENTY = 1e15


def kind(ranks, times=1.0, memory=PLENTY, **rates):
    found = replace(A100, flops_per_s=A100.flops_per_s * times, memory_Bps=A100.memory_Bps * times)
    return KindOfRank(ranks=ranks, rates=replace(found, **rates), reached=REACHED, memory_bytes=memory)


def way(pipeline, data, **more):
    return Options(pipeline=float(pipeline), data=float(data), microbatches=8.0, microbatch=2.0, **more)


@pytest.mark.parametrize("pipeline", [1, 2, 4, 6])
@pytest.mark.parametrize("placement", list(Placement))
def test_two_kinds_that_are_alike_take_what_one_kind_takes(pipeline, placement):
    options = way(pipeline, 48 / pipeline, placement=placement, whole_layers=1)
    found = transformer_prices(SHAPE, options, [kind(16), kind(32)], A100)
    for part, alone in (
        (found.seconds, step_seconds(SHAPE, options, A100, REACHED)),
        (found.num_bytes, rank_bytes(SHAPE, options)),
    ):
        for field in fields(part):
            assert getattr(part, field.name) == pytest.approx(getattr(alone, field.name), abs=1e-12)


def test_stages_lie_where_their_ranks_are():
    assert [(each.kinds, each.stages, each.last) for each in stages_alike([8, 8], 4, apart=True)] == [
        ((0,), 2, False),
        ((1,), 1, False),
        ((1,), 1, True),
    ]
    across = stages_alike([12, 4], 2, apart=True)
    assert [(each.kinds, each.stages) for each in across] == [((0,), 1), ((0, 1), 1)]
    inside = stages_alike([8, 8], 4, apart=False)
    assert {each.kinds for each in inside} == {(0, 1)}
    assert sum(each.stages for each in inside) == 4


@given(
    st.lists(st.tuples(st.integers(1, 2), st.floats(0.3, 3.0)), min_size=1, max_size=2),
    st.integers(4, 9),
)
@settings(deadline=None, max_examples=60)
def test_no_other_deal_of_blocks_is_faster(kinds, layers):
    shape = replace(SHAPE, layers=float(layers))
    there = [kind(8 * stages, times) for stages, times in kinds]
    pipeline = sum(stages for stages, _ in kinds)
    options = replace(way(pipeline, 8), microbatches=1e6)  # so that the end of a step does not count
    found = transformer_prices(shape, options, there, A100).seconds
    blocks = [
        float(block_seconds(shape, options, each.rates, REACHED).total)
        for each, (stages, _) in zip(there, kinds, strict=True)
        for _ in range(stages)
    ]
    head = float(head_seconds(shape, options, there[-1].rates, REACHED))
    times = np.array(blocks)
    ends = np.array([0.0] * (pipeline - 1) + [head])
    deals = itertools.product(range(1, layers + 1), repeat=pipeline)
    best = min((np.array(deal) * times + ends).max() for deal in deals if sum(deal) == layers)
    parts = found.compute + found.imbalance + found.tensor
    assert float(parts) / 1e6 == pytest.approx(best, rel=1e-3)


@given(st.floats(0.2, 4.0), st.floats(1.0, 4.0), st.floats(1.01, 4.0))
@settings(deadline=None)
def test_blocks_stay_within_memory_and_more_of_it_is_never_slower(small, times, more):
    one = float(stage_bytes(SHAPE, way(2, 8), 1.0, last=False).total)
    none = float(stage_bytes(SHAPE, way(2, 8), 0.0, last=False).total)
    limit = none + (one - none) * (3 + small)
    kinds = [kind(8, times, memory=limit), kind(8)]
    found = transformer_prices(SHAPE, way(2, 8), kinds, A100)
    assert found.blocks[0, 0] <= 3 + small
    assert found.num_bytes.total <= found.limit
    assert found.blocks.sum() >= SHAPE.layers
    larger = transformer_prices(
        SHAPE, way(2, 8), [replace(kinds[0], memory_bytes=limit * more), kinds[1]], A100
    )
    assert larger.seconds.total <= found.seconds.total * (1 + 1e-9)


def test_messages_between_kinds_are_slow_and_sums_inside_of_one_are_not():
    slow = replace(A100, network_Bps=1e9)
    apart = transformer_prices(SHAPE, way(2, 16), [kind(16), kind(16)], slow).seconds
    together = transformer_prices(
        SHAPE, way(2, 16, placement=Placement.DPT), [kind(16), kind(16)], slow
    ).seconds
    alone = step_seconds(SHAPE, way(2, 16), A100, REACHED)
    assert apart.all_reduce == pytest.approx(float(alone.all_reduce))
    assert apart.point_to_point > alone.point_to_point * 10
    assert together.all_reduce > alone.all_reduce * 10


def test_a_chain_gives_faster_nodes_more_layers():
    chain = convolutional_chain()
    kinds = [kind(8, 3.0), kind(8)]
    options = replace(way(2, 8), microbatch=128.0)
    found = chain_prices(chain, options, kinds, A100, precision=BF16, width=2)
    slow = chain_prices(chain, options, [kind(8)], A100, precision=BF16, width=2).seconds
    assert found.blocks[0, 0] > found.blocks[1, 0]
    assert found.seconds.total < slow.total


def mixed(text):
    return Task(
        model=find_architecture("gpt-neox-20b"), machines=parse_inventory(text), batch=256, dtype="float16"
    )


def test_a_search_deals_layers_by_kind_and_says_so():
    answer = search(mixed("p4d.24xlarge*2 + p5.48xlarge*2"))
    both = search(mixed("p5.48xlarge*2")).best
    best = answer.best
    assert best.layers["p5.48xlarge"] > best.layers["p4d.24xlarge"] > 0
    assert best.step_s < both.step_s
    assert best.peak_bytes <= best.limit_bytes
    assert "on p5.48xlarge" in best.title
    assert best.to_dict()["layers"] == dict(best.layers)
    assert any("layers a rank" in sentence for sentence in reasons(answer))
    assert all(each.share >= -1e-6 for each in sensitivities(answer.task, best))
