"""Optimizers of Keras that scale losses: what they call to see whether gradients are finite."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from shardwright.tensorflow._private.functions import replaced
from shardwright.tensorflow._private.keras import uses_keras_3


def loss_scale_classes() -> list[tuple[type, str]]:
    """(class, method) of optimizers around others, which take gradients of scaled losses."""
    if uses_keras_3():
        from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

        return [(LossScaleOptimizer, "apply")]
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    return [
        (loss_scale_optimizer.LossScaleOptimizer, "apply_gradients"),
        (loss_scale_optimizer.LossScaleOptimizerV3, "apply_gradients"),
    ]


def scaled_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of one that scales losses; any other as it is."""
    scales = isinstance(optimizer, tuple(owner for owner, _ in loss_scale_classes()))
    inner: Any = getattr(optimizer, "inner_optimizer", None)
    return inner if scales else optimizer


@contextmanager
def replaced_finite_check(
    make: Callable[[Callable[[Sequence[Any]], Any]], Callable[[Sequence[Any]], Any]],
) -> Iterator[None]:
    """Replaces what says whether all gradients of a list are finite."""
    if uses_keras_3():
        ((owner, _),) = loss_scale_classes()

        def of_method(original: Any) -> Any:
            def check_finite(self: Any, grads: Sequence[Any]) -> Any:
                return make(lambda each: original(self, each))(grads)

            return check_finite

        with replaced(owner, "check_finite", of_method):
            yield
        return
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    with replaced(loss_scale_optimizer, "_is_all_finite", make):
        yield


@contextmanager
def scales_made_early() -> Iterator[None]:
    """Has Keras 3 make the variables of a scale when a loss is first scaled, and no slots.

    It makes them in ``build``, with the slots of all variables that it is given. Until then ``scale_loss``
    takes the initial scale, which a graph would keep for ever.
    """
    if not uses_keras_3():
        yield
        return
    ((owner, _),) = loss_scale_classes()

    def make(original: Any) -> Any:
        def scale_loss(self: Any, loss: Any) -> Any:
            if not self.built:
                _make_scale(self)
            return original(self, loss)

        return scale_loss

    with replaced(owner, "scale_loss", make):
        yield


def _make_scale(optimizer: Any) -> None:
    inner = optimizer.inner_optimizer
    was_built = inner.built
    with tf.init_scope():
        inner.built = True
        try:
            optimizer.build([])
        finally:
            inner.built = was_built
    optimizer.built = True


def update_scale(optimizer: Any) -> Any:
    """Updates the scale of legacy Keras where this rank has no gradients; gives whether all were finite."""
    if not optimizer.dynamic:
        return tf.constant(True)
    _, are_finite = optimizer._loss_scale.update([])
    return are_finite
