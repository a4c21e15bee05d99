"""Finds the largest batch that machines train at once.

Gradient accumulation trains any batch. Memory bounds what is in flight at the same time: a microbatch per
replica, and in a pipeline as many as it has ranks.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.costs import Options
from shardwright.errors import ConfigError, InfeasiblePlanError
from shardwright.quantities import format_bytes
from shardwright.topology.pricing import bytes_of, fits
from shardwright.topology.search import Answer, best_of
from shardwright.topology.space import all_ways
from shardwright.topology.task import MOST_BATCH, Task

__all__ = ["largest_batch", "ways_at_once"]

_OF_BATCHES = ("microbatch", "microbatches")


def largest_batch(task: Task) -> Answer:
    """The fastest way to train the largest multiple of the task's batch without accumulating gradients."""
    for name in _OF_BATCHES:
        if name in task.pins:
            raise ConfigError(
                f"{name} is {task.pins[name]}, but the largest batch decides how it is cut. Unpin it."
            )
    ways = ways_at_once(task)
    steps = task.batch / np.gcd(task.batch, (ways.data * ways.pipeline).astype(int))
    counts = _largest(task, ways, steps)
    batches = ways.data * ways.pipeline * steps * counts
    largest = int(batches.max(initial=0))
    if not largest:
        needed = np.asarray(bytes_of(task, _with(ways, steps)).total).min()
        raise InfeasiblePlanError(
            f"a batch of {task.batch} samples at once fits in no way: the smallest needs "
            f"{format_bytes(needed)} a rank, of {format_bytes(task.memory_bytes)}. Take a smaller --batch, "
            "whose multiples are tried, more or larger accelerators, or the objective speed, which "
            "accumulates gradients."
        )
    chosen = np.flatnonzero(batches == largest)
    found = _with(ways, steps * counts).take(chosen)
    return best_of(replace(task, batch=largest), found, objective="speed", num_ways=len(batches))


def ways_at_once(task: Task) -> Options:
    """All ways apart from their batch: a microbatch for each rank of a pipeline, of one sample."""
    ways = all_ways(replace(task, batch=task.machines.num_ranks))
    return _with(ways.take(np.flatnonzero(ways.microbatch == 1)), np.ones(1))


def _with(ways: Options, samples: NDArray[np.float64]) -> Options:
    microbatch = np.broadcast_to(samples, ways.pipeline.shape).astype(float)
    return replace(ways, microbatch=microbatch, microbatches=ways.pipeline * 1.0)


def _largest(task: Task, ways: Options, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """The most multiples of its step in the microbatch of each way; 0 where none fits."""
    low = np.zeros(len(steps))
    high = np.floor(MOST_BATCH / (ways.data * ways.pipeline * steps)) + 1
    while (high - low > 1).any():
        middle = np.floor((low + high) / 2)
        # What has been found stays as it is.
        middle = np.where(high - low > 1, middle, np.maximum(low, 1))
        there_is_room = fits(task, _with(ways, steps * middle))
        still_open = high - low > 1
        low = np.where(still_open & there_is_room, middle, low)
        high = np.where(still_open & ~there_is_room, middle, high)
    return low
