"""The largest batch that is trained at once."""

import pytest
from graphs import convolutional_chain

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.errors import ConfigError, InfeasiblePlanError
from shardwright.planner.ways import Task, largest_batch


def task_of(model="gpt2-1.5b", machines="p4d.24xlarge", **more):
    found = convolutional_chain() if model == "convolutions" else find_architecture(model)
    return Task(model=found, machines=parse_inventory(machines), **{"batch": 8, **more})


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
