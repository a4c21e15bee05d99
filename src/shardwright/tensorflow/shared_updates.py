"""Divides the updates of a stage over its replicas, so that none has the slots of all variables.

::

    replica 0   means of gradients ─▶ updates a and c ─┐
                                                       ├─ new values ─▶ a, b and c on both
    replica 1   means of gradients ─▶ updates b ───────┘

A variable is updated whole, by one replica: optimizers of Keras know no parts of variables.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
import torch.distributed as dist

from shardwright.run.context import Context
from shardwright.tensorflow.channels import to_tensorflow, to_torch
from shardwright.tensorflow.turns import call_in_turn
from shardwright.tensorflow.variables import tf_variable

__all__ = ["SharedUpdates"]


class SharedUpdates:
    """The replica that updates each variable of this rank's stages."""

    def __init__(self, context: Context):
        assert context.groups.data is not None
        self._group = context.groups.data
        self._holders = context.holders
        self._rank = context.data_rank
        self._replica_of: dict[int, int] = {}
        self._known: list[Any] = []  # held, so that no id is used again
        self._bytes = [0] * context.mesh.data

    def mine(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The pairs of gradients and variables that this replica updates."""
        self._divide([tf_variable(variable) for _, variable in pairs])
        return [pair for pair in pairs if self._replica_of[id(tf_variable(pair[1]))] == self._rank]

    def bring(self, variables: Sequence[Any]) -> None:
        """Gives all replicas the new values; collective over them."""
        owns = [tf_variable(variable) for variable in variables]
        replicas = [self._replica_of[id(own)] for own in owns]
        mine = [
            own.read_value() for own, replica in zip(owns, replicas, strict=True) if replica == self._rank
        ]
        others = [own for own, replica in zip(owns, replicas, strict=True) if replica != self._rank]
        specs = [(tuple(own.shape.as_list()), own.dtype.name) for own in owns]

        def now(*given: Any) -> list[Any]:
            return self._broadcast(specs, replicas, given)

        for own, value in zip(others, call_in_turn(now, mine, [own.dtype for own in others]), strict=True):
            own.assign(tf.ensure_shape(value, own.shape))

    def sum_over_replicas(self, number: torch.Tensor) -> None:
        """Adds up what replicas have of a number, such as the square of a norm; collective over them."""
        dist.all_reduce(number, group=self._group)

    def _divide(self, owns: Sequence[Any]) -> None:
        """Gives new variables, the largest first, to the replica that has least to update."""
        new = [own for own in owns if id(own) not in self._replica_of]
        for own in sorted(new, key=lambda each: -each.shape.num_elements()):
            replica = self._bytes.index(min(self._bytes))
            self._replica_of[id(own)] = replica
            self._bytes[replica] += own.shape.num_elements() * own.dtype.size
            self._known.append(own)

    def _broadcast(
        self, specs: Sequence[tuple[tuple[int, ...], str]], replicas: Sequence[int], given: Sequence[Any]
    ) -> list[Any]:
        mine = iter(given)
        pending = []
        for (shape, dtype), replica in zip(specs, replicas, strict=True):
            is_mine = replica == self._rank
            value = to_torch(next(mine)) if is_mine else torch.empty(shape, dtype=getattr(torch, dtype))
            work = dist.broadcast(value, self._holders[replica], group=self._group, async_op=True)
            pending.append((None if is_mine else value, work))
        found = []
        for arriving, work in pending:
            if work is not None:
                work.wait()
            if arriving is not None:
                found.append(to_tensorflow(arriving))
        return found
