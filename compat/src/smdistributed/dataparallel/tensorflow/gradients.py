"""Gradients that are averaged over ranks before an optimizer has them."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from smdistributed.dataparallel.tensorflow.collectives import Reduction, reduced_each

Average = Callable[[Sequence[Any]], list[Any]]


def over_ranks(reduction: Reduction, *, compression: Any, sparse_as_dense: bool) -> Average:
    """What makes the gradients of all ranks of a list; arguments as for `reduced_each`."""

    def average(gradients: Sequence[Any]) -> list[Any]:
        return reduced_each(gradients, reduction, compression=compression, sparse_as_dense=sparse_as_dense)

    return average


def distributed_tape(tape: Any, average: Average) -> Any:
    """A tape whose gradients are those of all ranks together.

    Args:
        average: makes the gradients of all ranks of a list.
    """
    if not isinstance(tape, tf.GradientTape):
        raise UsageError(f"DistributedGradientTape takes a tf.GradientTape, not a {type(tape).__name__}.")

    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        made = super(wrapper, self).gradient(target, sources, *args, **kwargs)
        return tf.nest.pack_sequence_as(sources, average(tf.nest.flatten(made)))

    wrapper: Any = type(type(tape).__name__, (type(tape),), {"gradient": gradient})
    tape.__class__ = wrapper
    return tape


def distributed_optimizer(optimizer: Any, average: Average) -> Any:
    """A Keras optimizer that averages gradients over all ranks before it applies them.

    Args:
        average: makes the gradients of all ranks of a list.

    Raises:
        UsageError: it is no optimizer of Keras, or is one that does so already.
    """
    own = type(optimizer)
    method = next((name for base, name in _private.optimizer_classes() if isinstance(optimizer, base)), None)
    if method is None:
        raise UsageError(f"DistributedOptimizer takes a Keras optimizer, not a {own.__name__}.")
    if getattr(own, "averages_over_ranks", False):
        raise UsageError("the optimizer is wrapped by DistributedOptimizer already. Wrap it once.")

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return super(wrapper, self).apply(average(list(grads)), trainable_variables)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        means = average([gradient for gradient, _ in pairs])
        variables = [variable for _, variable in pairs]
        return super(wrapper, self).apply_gradients(zip(means, variables, strict=True), *args, **kwargs)

    chosen = apply if method == "apply" else apply_gradients
    # Models are saved with the name of the class, and are loaded with that of Keras.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    wrapper: Any = type(own.__name__, (own,), {**names, method: chosen, "averages_over_ranks": True})
    optimizer.__class__ = wrapper
    return optimizer
