"""Keeps replicas of a pipeline alike: first values, gradients, running statistics.

::

    replica 0   gradients ─┐          ┌─ mean ─▶ optimizer
    replica 1   gradients ─┴─ bucket ─┴─ mean ─▶ optimizer

The ranks that hold the same stage in each replica do this among themselves.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
import torch.distributed as dist

from shardwright.comm.messages.bucketed_sums import sums_over
from shardwright.run.context import Context
from shardwright.tensorflow.channels import to_tensorflow, to_torch
from shardwright.tensorflow.results import Results
from shardwright.tensorflow.variables import tf_variable

__all__ = ["Replicas"]


class Replicas:
    """The ranks with the same stages, one in each replica."""

    def __init__(self, context: Context):
        assert context.groups.data is not None
        self._group = context.groups.data
        self._source = context.holders[0]
        self._is_source = context.data_rank == 0
        self._count = context.mesh.data
        self._alike: dict[int, Any] = {}  # held, so that no id is used again

    def begin_with(self, variables: Sequence[Any]) -> None:
        """Gives all replicas the first one's values of variables that had no first step yet; collective."""
        new = [own for own in map(tf_variable, variables) if id(own) not in self._alike]
        self._alike.update((id(own), own) for own in new)
        with tf.init_scope():  # a tf.function may be under way
            self.share(new)

    def share(self, variables: Sequence[Any]) -> None:
        """Gives all replicas the first one's values of these variables; collective."""
        pending = []
        for own in map(tf_variable, variables):
            value = to_torch(own.read_value()).clone()
            work = dist.broadcast(value, self._source, group=self._group, async_op=True)
            pending.append((own, value, work))
        for own, value, work in pending:
            if work is not None:
                work.wait()
            if not self._is_source:
                own.assign(to_tensorflow(value))

    def average(self, results: Results, num_microbatches: int) -> None:
        """Makes of this replica's sums of gradients the means over the microbatches of all; collective.

        Replicas may have different numbers of microbatches: each counts the same.
        """
        positions = sorted(results.sums)
        sums = [to_torch(results.sums[position]) for position in positions]
        means = sums_over(self._group, sums, divisor=num_microbatches * self._count)
        results.sums.update(zip(positions, map(to_tensorflow, means), strict=True))

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Numbers of all replicas added up; collective."""
        return [each * self._count for each in self.means(numbers)]

    def means(self, numbers: Sequence[float]) -> list[float]:
        """Numbers of this replica as means over all; collective."""
        row = torch.tensor(numbers, dtype=torch.float64)
        (found,) = sums_over(self._group, [row], divisor=self._count)
        return list(found.tolist())
