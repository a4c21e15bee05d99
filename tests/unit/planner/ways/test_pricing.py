"""Ways are priced block by block: the prices are the same."""

from dataclasses import fields
from unittest import mock

import numpy as np
import pytest
from planner.machines import all_ways

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.costs import rank_bytes, step_seconds
from shardwright.planner.ways import way
from shardwright.planner.ways.task import Task


@pytest.mark.parametrize("pins", [{}, {"placement": 1}, {"kept_layers": 1}])
def test_blocks_of_ways_have_the_prices_of_all_at_once(pins: dict[str, int]) -> None:
    model, machines = find_architecture("mixtral-8x7b"), parse_inventory("p4d.24xlarge*2")
    task = Task(model=model, machines=machines, batch=16, pins=pins)
    ways = all_ways(task)
    seconds = step_seconds(task.shape, ways, task.rates, task.calibration.efficiencies)
    num_bytes = rank_bytes(task.shape, ways, precision=task.precision)
    with mock.patch.object(way, "_ROWS_OF_BLOCK", 1000):
        assert len(ways.pipeline) > 3000
        for found, expected in (
            (way.prices_of(task, ways).seconds, seconds),
            (way.prices_of(task, ways).num_bytes, num_bytes),
            (way.memory_of(task, ways)[0], num_bytes),
        ):
            for field in fields(expected):
                assert np.array_equal(getattr(found, field.name), getattr(expected, field.name)), field.name
        on_device = num_bytes.total <= task.memory_bytes
        on_host = (ways.offload == 0) | (num_bytes.host <= task.host_bytes)
        assert np.array_equal(way.fits(task, ways), on_device & on_host)
