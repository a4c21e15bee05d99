"""The largest batch that is trained at once."""

from dataclasses import replace

import numpy as np
import pytest
from graphs import convolutional_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.errors import ConfigError, InfeasiblePlanError
from shardwright.planner.ways import Task, largest_batch
from shardwright.planner.ways.pricing import memory_of
from shardwright.planner.ways.search import ways_at_once


def task_of(model="gpt2-1.5b", machines="p4d.24xlarge", **more):
    found = convolutional_chain() if model == "convolutions" else find_architecture(model)
    return Task(model=found, machines=parse_inventory(machines), **{"batch": 8, **more})


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(
    model=st.sampled_from(["gpt2-1.5b", "convolutions"]),
    machines=st.sampled_from(["p4d.24xlarge", "rtx4090x4"]),
    batch=st.sampled_from([16, 24]),
    pins=st.sampled_from([{"offload": 0}, {"recompute": 0, "offload": 0}, {"sharded": 0, "offload": 0}]),
)
def test_it_fits_and_no_larger_one_does(model, machines, batch, pins):
    task = task_of(model, machines, batch=batch, pins=pins, dtype="float16")
    try:
        found = largest_batch(task)
    except InfeasiblePlanError:
        assert (model, machines) == ("gpt2-1.5b", "rtx4090x4")
        return
    best = found.best.options
    assert found.task.batch % batch == 0
    assert found.best.peak_bytes <= task.memory_bytes
    assert best.microbatches == best.pipeline
    assert best.global_batch == found.task.batch
    ways = ways_at_once(task)
    for times in range(1, 6):
        larger = found.task.batch + times * batch
        samples = larger / (ways.data * ways.pipeline)
        whole = np.flatnonzero(samples % 1 == 0)
        cut = replace(ways.take(whole), microbatch=samples[whole])
        assert not (np.asarray(memory_of(task, cut)[0].total) <= task.memory_bytes).any()


def test_a_model_that_does_not_fit_says_what_would_help():
    with pytest.raises(InfeasiblePlanError, match="Take a smaller --batch"):
        largest_batch(task_of("gpt3-175b", "rtx4090x4", batch=4, pins={"offload": 0}))
    with pytest.raises(ConfigError, match="microbatch is 2, but the largest batch decides"):
        largest_batch(task_of(pins={"microbatch": 2}))


def test_more_memory_allows_no_smaller_batch():
    small, large = (largest_batch(task_of(machines=name)) for name in ("p4d.24xlarge", "p4de.24xlarge"))
    assert small.task.batch <= large.task.batch


def test_what_is_offloaded_has_room_in_the_hosts_memory():
    task = task_of("convolutions", "p4d.24xlarge", batch=8, pins={"recompute": 0})
    found = largest_batch(task)
    assert found.best.options.offload == 2
    # 55 layers keep 400,000 numbers of 16 bits each, in 80 % of an eighth of 1152 GiB; some stay.
    assert found.task.batch < 8 * 0.8 * 1152 / 8 * 2**30 / (2 * 55 * 4e5) * 1.15
