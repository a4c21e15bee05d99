"""Nodes of several kinds: chains are dealt by how fast they are; a search takes one kind."""

from dataclasses import replace

import pytest
from graphs import convolutional_chain

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.costs import KindOfRank, Options, Rates, calibration_of, chain_prices
from shardwright.costs.kinds import stages_alike
from shardwright.costs.memory import BF16
from shardwright.errors import ConfigError
from shardwright.planner.ways import Task

A100 = Rates(flops_per_s=312e12, memory_Bps=2e12, link_Bps=300e9, network_Bps=100e9, per_node=8.0)
REACHED = calibration_of("A100", "megatron").efficiencies


def kind(ranks, times=1.0):
    rates = replace(A100, flops_per_s=A100.flops_per_s * times, memory_Bps=A100.memory_Bps * times)
    return KindOfRank(ranks=ranks, rates=rates, reached=REACHED, memory_bytes=1e15)


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


def test_faster_nodes_make_the_step_of_a_chain_shorter():
    chain = convolutional_chain()
    options = Options(pipeline=2.0, data=8.0, microbatches=8.0, microbatch=128.0)
    mixed, slow = (
        chain_prices(chain, options, kinds, A100, precision=BF16, width=2).seconds.total
        for kinds in ([kind(8, 3.0), kind(8)], [kind(8)])
    )
    assert mixed < slow


def test_a_search_over_several_kinds_is_refused():
    machines = parse_inventory("p4d.24xlarge*2 + p5.48xlarge*2")
    with pytest.raises(ConfigError, match=r"has A100-40GB and H100.*Search each kind alone"):
        Task(model=find_architecture("gpt-neox-20b"), machines=machines, batch=256, dtype="float16")
