"""Seconds and bytes of a step: they add up, and go the way that machines do."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.catalogue import find_architecture
from shardwright.costs import (
    Offload,
    Options,
    Rates,
    Recompute,
    ScheduleKind,
    Shape,
    Sharded,
    calibration_of,
    rank_bytes,
    step_seconds,
)

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
        hierarchical=draw(st.sampled_from([0, 1])),
        whole_layers=draw(st.sampled_from([0, 1])),
    )


@given(SHAPES, ways())
@settings(deadline=None)
def test_parts_are_no_less_than_nothing_and_add_up(shape, options):
    for found in (step_seconds(shape, options, A100, REACHED), rank_bytes(shape, options)):
        # What is on a host is on no accelerator.
        parts = [float(getattr(found, field.name)) for field in fields(found) if field.name != "host"]
        assert min(parts) >= -1e-9
        assert sum(parts) == pytest.approx(float(found.total))
        assert np.isfinite(float(found.total))


@given(
    SHAPES,
    ways(),
    st.sampled_from(["flops_per_s", "memory_Bps", "link_Bps", "network_Bps", "host_Bps"]),
    st.floats(1.01, 10),
)
@settings(deadline=None)
def test_faster_machines_are_never_slower(shape, options, rate, factor):
    before = step_seconds(shape, options, A100, REACHED).total
    better = replace(A100, **{rate: getattr(A100, rate) * factor})
    assert step_seconds(shape, options, better, REACHED).total <= before * (1 + 1e-12)


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
