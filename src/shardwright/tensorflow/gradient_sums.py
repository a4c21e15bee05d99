"""Sums of gradients over the microbatches of a batch, in memory that the pieces of a step add to.

::

    microbatch 0   backward piece ─▶ += ┐
    microbatch 1   backward piece ─▶ += ┼─ one tensor a gradient ─▶ the caller
    microbatch 2   backward piece ─▶ += ┘

So a gradient is no result of a call, for which room would be made each time, and no operation of its own adds
it up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from shardwright.model_graph import TensorSpec

_Key = tuple[int, TensorSpec]


class GradientSums:
    """The sums of a rank; batches come one after the other, so all step functions share them."""

    def __init__(self) -> None:
        self._variables: dict[_Key, Any] = {}
        self._calls: dict[tuple[_Key, ...], tuple[Any, Any]] = {}

    def variable(self, position: int, spec: TensorSpec) -> Any:
        """The variable with the sum of an output; it has a value between `begin` and `taken`."""
        key = position, spec
        if key not in self._variables:
            with tf.init_scope():
                self._variables[key] = tf.Variable(
                    tf.zeros([0], spec.dtype), shape=tf.TensorShape(None), trainable=False, name="sum"
                )
        return self._variables[key]

    def begin(self, positions: Sequence[int], specs: Mapping[int, TensorSpec]) -> None:
        """Sets these sums to zero."""
        if positions:
            self._calls_of(positions, specs)[0]()

    def taken(self, positions: Sequence[int], specs: Mapping[int, TensorSpec]) -> dict[int, Any]:
        """The sums, by position; they hold no memory here any more."""
        if not positions:
            return {}
        return dict(zip(positions, self._calls_of(positions, specs)[1](), strict=True))

    def _calls_of(self, positions: Sequence[int], specs: Mapping[int, TensorSpec]) -> tuple[Any, Any]:
        keys = tuple((position, specs[position]) for position in positions)
        if keys not in self._calls:
            with tf.init_scope():
                self._calls[keys] = self._traced(keys)
        return self._calls[keys]

    def _traced(self, keys: Sequence[_Key]) -> tuple[Any, Any]:
        variables = [self.variable(*key) for key in keys]

        def begin() -> Any:
            for variable, (_, spec) in zip(variables, keys, strict=True):
                variable.assign(tf.zeros(spec.shape, spec.dtype))
            return tf.constant(0)

        def take() -> list[Any]:
            found = []
            for variable, (_, spec) in zip(variables, keys, strict=True):
                found.append(tf.ensure_shape(variable.read_value(), spec.shape))
                variable.assign(tf.zeros([0], spec.dtype))
            return found

        made = [tf.function(each, autograph=False).get_concrete_function() for each in (begin, take)]
        return made[0], made[1]
