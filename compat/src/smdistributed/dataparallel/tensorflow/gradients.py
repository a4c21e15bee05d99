"""Gradients that are averaged over ranks before an optimizer has them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from smdistributed.dataparallel.tensorflow.collectives import Reduction, reduced_each

Average = Callable[[Sequence[Any]], list[Any]]


class _Means:
    """Makes gradients those of all ranks, once on their way through an optimizer inside of another."""

    def __init__(self, average: Average):
        self._average = average
        self._are_made = False

    @contextmanager
    def once(self) -> Iterator[Average]:
        """Gives what makes them; while it lasts, `once` gives what leaves them as they are."""
        are_made, self._are_made = self._are_made, True
        try:
            yield list if are_made else self._average
        finally:
            self._are_made = are_made


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
    if _means_of(optimizer) or _means_of(_private.scaled_optimizer(optimizer)):
        raise UsageError("the optimizer is wrapped by DistributedOptimizer already. Wrap it once.")
    _tell_keras()
    means = _Means(average)
    # Models are saved with the name of the class, and are loaded with that of Keras.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    chosen = _averaging(method, getattr(own, method), lambda _: means)
    optimizer.__class__ = type(own.__name__, (own,), {**names, method: chosen, "means_over_ranks": means})
    return optimizer


def _means_of(optimizer: Any) -> _Means | None:
    return getattr(type(optimizer), "means_over_ranks", None)


def _averaging(name: str, original: Any, means_of: Callable[[Any], _Means | None]) -> Any:
    """A method that takes gradients, with those of all ranks if `means_of` its optimizer makes them."""

    def once(optimizer: Any) -> AbstractContextManager[Average]:
        means = means_of(optimizer)
        return nullcontext(list) if means is None else means.once()

    @wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        with once(self) as average:
            return original(self, average(list(grads)), trainable_variables)

    @wraps(original)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        with once(self) as average:
            means = average([gradient for gradient, _ in pairs])
            variables = [variable for _, variable in pairs]
            return original(self, zip(means, variables, strict=True), *args, **kwargs)

    return apply if name == "apply" else apply_gradients


@cache
def _tell_keras() -> None:
    """What Keras itself puts around an optimizer that averages is to work.

    An optimizer that scales losses leaves out steps with infinite gradients. It averages first, so that all
    ranks leave out the same.
    """
    for owner, name in _private.loss_scale_classes():
        changed = _averaging(name, vars(owner)[name], lambda self: _means_of(self.inner_optimizer))
        setattr(owner, name, changed)
    _private.keep_from_xla(lambda model: _means_of(_private.scaled_optimizer(model.optimizer)) is not None)
