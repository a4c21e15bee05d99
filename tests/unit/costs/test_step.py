"""Seconds and bytes of a step: they add up, and go the way that machines do.

Nodes of several kinds: chains are dealt by how fast they are; a search takes one kind.

Microbatches in flight are those that the schedules keep.
"""

from dataclasses import replace

import pytest
from graphs import convolutional_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.costs import (
    Dispatch,
    Gathers,
    Hides,
    KindOfRank,
    Offload,
    Options,
    Placement,
    Rates,
    Recompute,
    ScheduleKind,
    Shape,
    Sharded,
    calibration_of,
    chain_prices,
    known_runtimes,
    rank_bytes,
    step_seconds,
)
from shardwright.costs.kinds import stages_alike
from shardwright.costs.memory import BF16, in_flight
from shardwright.costs.step import slowest_stage
from shardwright.errors import ConfigError
from shardwright.planner.ways import Task
from shardwright.schedule import StageCost, build_schedule, simulate

A100 = Rates(flops_per_s=312e12, memory_Bps=2e12, link_Bps=300e9, network_Bps=100e9, per_node=8.0)
REACHED = calibration_of("A100", "megatron").efficiencies
DEGREES = st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0])
SHAPES = st.sampled_from(["gpt2-1.5b", "gpt-neox-20b", "llama3-8b", "mixtral-8x7b", "t5-11b"]).map(
    lambda name: Shape.of(find_architecture(name))
)


@st.composite
def ways(draw):
    pipeline, kind = draw(DEGREES), draw(st.sampled_from(list(ScheduleKind)))
    data = draw(DEGREES)
    return Options(
        tensor=draw(DEGREES),
        pipeline=pipeline,
        virtual=2.0 if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V) else 1.0,
        data=data,
        shard=draw(st.sampled_from([d for d in (1.0, 2.0, 4.0, 8.0, 16.0) if d <= data])),
        sharded=draw(st.sampled_from(list(Sharded))),
        context=draw(st.sampled_from([1.0, 2.0, 4.0])),
        expert=draw(st.sampled_from([1.0, 2.0])),
        microbatch=draw(st.sampled_from([1.0, 2.0, 4.0])),
        microbatches=draw(st.sampled_from([1.0, 4.0, 16.0, 256.0])),
        schedule=kind,
        recompute=draw(st.sampled_from(list(Recompute))),
        offload=draw(st.sampled_from(list(Offload))),
        sequence_parallel=draw(st.sampled_from([0, 1])),
        flash=draw(st.sampled_from([0, 1])),
        hierarchical=draw(st.sampled_from(list(Gathers))),
        whole_layers=draw(st.sampled_from([0, 1])),
        hides_sums=draw(st.sampled_from(list(Hides))),
        dispatch=draw(st.sampled_from(list(Dispatch))),
        as_here=draw(st.sampled_from([0, 1])),
        stops_early=draw(st.sampled_from([0, 1])),
        placement=draw(st.sampled_from(list(Placement))),
    )


@given(
    SHAPES,
    ways(),
    st.sampled_from(["flops_per_s", "memory_Bps", "link_Bps", "network_Bps", "host_Bps"]),
    st.floats(1.01, 10),
    st.sampled_from(known_runtimes()),
    st.floats(0, 1.5),
    st.floats(0.1, 10),
)
@settings(deadline=None)
def test_faster_machines_are_never_slower(shape, options, rate, factor, runtime, exposed, wires):
    """Whatever hides behind what: of traffic that two things could hide, neither is counted twice."""
    reached = replace(calibration_of("H100", runtime).efficiencies, exposed=exposed)
    machines = replace(A100, link_Bps=wires * A100.link_Bps, network_Bps=wires * A100.network_Bps)
    before = step_seconds(shape, options, machines, reached).total
    better = replace(machines, **{rate: getattr(machines, rate) * factor})
    assert step_seconds(shape, options, better, reached).total <= before * (1 + 1e-12)


@given(SHAPES, ways())
@settings(deadline=None)
def test_recomputation_takes_time_and_spares_memory(shape, options):
    options = replace(options, offload=Offload.NOTHING)  # less to move would save time
    seconds, kept = [], []
    for recompute in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL):
        way = replace(options, recompute=recompute)
        seconds.append(float(step_seconds(shape, way, A100, REACHED).total))
        kept.append(float(rank_bytes(shape, way).activations))
    # What is computed again hides communication of shards: a little of it may be free, never more.
    assert seconds[0] <= seconds[2] * (1 + 1e-9)
    assert kept[0] >= kept[1]
    assert kept[0] >= kept[2]


def test_a_head_of_its_own_is_gathered_summed_and_updated():
    """Both tables lie on one rank, unless pipeline ranks have one each."""
    tied = Shape.of(find_architecture("llama3-8b"))
    tied, apart = replace(tied, tied=1.0), replace(tied, tied=0.0)
    share = 1 + tied.embedding_parameters / (tied.layers * tied.block_parameters + tied.embedding_parameters)
    ways = Options(data=16.0, shard=16.0, sharded=int(Sharded.PARAMETERS))
    reached = replace(REACHED, exposed=1.0)
    for name in ("gather", "reduce_scatter", "update"):
        one, two = (float(getattr(step_seconds(s, ways, A100, reached), name)) for s in (tied, apart))
        assert two / one == pytest.approx(share, rel=1e-3)
    pipelined = replace(ways, pipeline=2.0, microbatches=4.0)
    assert step_seconds(tied, pipelined, A100, REACHED) == step_seconds(apart, pipelined, A100, REACHED)


def test_a_published_run_that_was_predicted_closely():
    """GPT-3 on 384 A100: 76.8 s a step, Narayanan et al. 2021, arXiv:2104.04473, table 2."""
    shape = replace(Shape.of(find_architecture("gpt3-175b")), vocabulary=51200.0)
    options = Options(
        tensor=8.0,
        pipeline=12.0,
        data=4.0,
        microbatches=384.0,
        recompute=Recompute.FULL,
        flash=0,
        hierarchical=0,
        whole_layers=1,
    )
    rates = replace(A100, network_Bps=200e9, memory_Bps=2.04e12)
    assert float(step_seconds(shape, options, rates, REACHED).total) == pytest.approx(76.8, rel=0.05)


@pytest.mark.parametrize(("layers", "pipeline", "virtual"), [(24, 8, 1), (24, 4, 3), (32, 2, 2)])
@pytest.mark.parametrize("head", [0.1, 0.9, 2.6, 8.0])
def test_whole_blocks_are_balanced_as_well_as_they_can_be(layers, pipeline, virtual, head):
    """Of all numbers of blocks for the stages but the last, tried one by one."""
    stages = pipeline * virtual
    tried = [layers / pipeline + head]
    for others in range(layers + 1):
        last = max(layers - (stages - 1) * others, 0)
        if others * (stages - 1) + last >= layers:
            tried.append(max(virtual * others, (virtual - 1) * others + last + head))
    assert _slowest(layers, pipeline, virtual, head) == pytest.approx(min(tried))


@pytest.mark.parametrize(("layers", "pipeline", "virtual"), [(30, 8, 1), (7, 4, 1), (44, 16, 2), (3, 4, 1)])
@pytest.mark.parametrize("head", [0.0, 0.1, 0.9, 2.6, 8.0])
def test_ranks_that_cannot_have_as_many_blocks_each_have_whole_ones(layers, pipeline, virtual, head):
    """Seven blocks on four ranks are two on one of them at least, not 7/4; a rank's stages may differ."""
    tried = [max(others, max(layers - (pipeline - 1) * others, 0) + head) for others in range(1, layers + 1)]
    assert _slowest(layers, pipeline, virtual, head) == pytest.approx(min(tried))


def _slowest(layers, pipeline, virtual, head):
    shape = replace(Shape.of(find_architecture("llama3-8b")), layers=float(layers))
    return float(slowest_stage(shape, Options(pipeline=pipeline, virtual=virtual), 1.0, head))


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


SPLIT = {"input_s": 1.0, "weight_s": 1.0}
FAMILIES = [
    (ScheduleKind.GPIPE, "gpipe", 1),
    (ScheduleKind.ONE_F_ONE_B, "1f1b", 1),
    (ScheduleKind.ZB_H1, "zb_h1", 1),
    (ScheduleKind.ZB_V, "zb_v", 2),
    (ScheduleKind.INTERLEAVED, "interleaved_1f1b", 2),
    (ScheduleKind.INTERLEAVED, "interleaved_1f1b", 4),
]


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize(("kind", "name", "virtual"), FAMILIES)
def test_every_rank_keeps_what_its_schedule_keeps(kind, name, virtual, pipeline, rounds):
    forth = tuple(range(pipeline))
    ranks = forth + forth[::-1] if kind is ScheduleKind.ZB_V else forth * virtual
    schedule = build_schedule(name, stage_ranks=ranks, num_microbatches=rounds * pipeline)
    split = SPLIT if name.startswith("zb") else {}
    cost = StageCost(forward_s=1.0, backward_s=2.0, saved_bytes=1, **split)
    kept = [num / virtual for num in simulate(schedule, [cost] * len(ranks)).peak_bytes]
    options = Options(
        pipeline=float(pipeline), virtual=float(virtual), microbatches=float(rounds * pipeline), schedule=kind
    )
    ours = [float(in_flight(options, rank)) for rank in range(pipeline)]
    if kind is ScheduleKind.ZB_V and pipeline == 2 and rounds == 1:
        assert ours == [2.0, 2.0]  # one rank needs less: the start of so short a schedule is unlike the rest
    else:
        assert ours == kept


def test_zero_1_gathers_what_each_rank_has_updated():
    shape, options = Shape.of(find_architecture("gpt2-1.5b")), Options(data=8.0, shard=8.0, sharded=1)
    there, here = (step_seconds(shape, replace(options, as_here=each), A100, REACHED) for each in (0, 1))
    sums = step_seconds(shape, replace(options, sharded=0, shard=1.0), A100, REACHED)
    assert there.update < here.update < there.update + sums.all_reduce + sums.compute
    assert (there.all_reduce, there.gather) == (here.all_reduce, here.gather)
