"""Optimizers of Keras: where they take gradients, what they keep for each variable, how they scale losses."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import clip_ops

from shardwright.tensorflow._private.graphs import replaced
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


def optimizer_classes() -> list[tuple[type, str]]:
    """(class, method) wherever Keras takes pairs of gradients and variables: all that optimizers inherit."""
    if uses_keras_3():
        from keras.src.optimizers.base_optimizer import BaseOptimizer

        return [(BaseOptimizer, "apply")]
    from tf_keras.src.optimizers import optimizer
    from tf_keras.src.optimizers.legacy import optimizer_v2

    return [
        (optimizer.Optimizer, "apply_gradients"),
        (optimizer_v2.OptimizerV2, "apply_gradients"),
    ]


def optimizer_bases() -> list[type]:
    """The classes that all optimizers inherit."""
    return list(dict.fromkeys(owner for owner, _ in optimizer_classes()))


@contextmanager
def replaced_global_norm(make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces the norm that clipping takes.

    `tf.clip_by_global_norm` looks it up in its own module, and Keras calls that function or, in version 3,
    has one of its own, which calls ``global_norm`` of its module.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(clip_ops, "global_norm", make))
        stack.enter_context(replaced(tf.linalg, "global_norm", make))
        if uses_keras_3():
            from keras.src.optimizers import base_optimizer

            stack.enter_context(replaced(base_optimizer, "global_norm", make))
        yield


def optimizer_variables(optimizer: Any) -> list[Any]:
    """All variables of an optimizer; those of `OptimizerV2` make their counter late, and have a method.

    Legacy Keras does not count the loss scale among them.
    """
    _ = optimizer.iterations  # makes it
    found = optimizer.variables
    found = list(found() if callable(found) and not isinstance(found, list) else found)
    scale: Any = getattr(optimizer, "_loss_scale", None)
    if hasattr(scale, "current_loss_scale"):
        known = {id(each) for each in found}
        found += [each for each in (scale.current_loss_scale, scale.counter) if id(each) not in known]
    return found


def count_update(optimizer: Any) -> Any:
    """Counts an update without gradients.

    ``iterations`` of Keras 3 is no variable where gradients of several batches are accumulated; the oldest
    optimizers make the variable when they are first asked for it.
    """
    _ = optimizer.iterations  # makes it
    return optimizer._iterations.assign_add(1)


def has_slots(optimizer: Any) -> bool:
    """Whether an optimizer has made its slots: it does so in its first update."""
    optimizer = scaled_optimizer(optimizer)
    if hasattr(optimizer, "get_slot_names"):
        return bool(optimizer.get_slot_names())
    return bool(getattr(optimizer, "built", None) or getattr(optimizer, "_built", False))


def make_slots(optimizer: Any, variables: list[Any]) -> None:
    """Has an optimizer make its slots for these variables."""
    optimizer = scaled_optimizer(optimizer)
    if hasattr(optimizer, "get_slot_names"):
        optimizer._create_all_weights(variables)
    else:
        optimizer.build(variables)


def slots_of(optimizer: Any, variable: Any) -> dict[str, Any]:
    """The slots that an optimizer has for a variable of the model, by name.

    Optimizers keep lists of slots, in the order of the variables that they were built for: `_momentums`, ...
    """
    optimizer = scaled_optimizer(optimizer)
    if hasattr(optimizer, "get_slot_names"):
        names = optimizer.get_slot_names()
        slots = optimizer._slots.get(optimizer_v2_key(variable), {})
        return {name: slots[name] for name in names if name in slots}
    indices = _slot_indices(optimizer)
    position = indices.get(optimizer._var_key(variable))
    if position is None:
        return {}
    return {
        name.lstrip("_"): slots[position]
        for name, slots in _slot_lists(optimizer).items()
        if slots[position] is not None
    }


def is_slot(optimizer: Any, variable: Any) -> bool:
    optimizer = scaled_optimizer(optimizer)
    if hasattr(optimizer, "get_slot_names"):
        return any(variable is slot for slots in optimizer._slots.values() for slot in slots.values())
    return any(variable is slot for slots in _slot_lists(optimizer).values() for slot in slots)


def optimizer_v2_key(variable: Any) -> Any:
    """Under which the oldest optimizers keep the slots of a variable."""
    return variable._unique_id


def _slot_indices(optimizer: Any) -> dict[Any, int]:
    found: dict[Any, int] = getattr(optimizer, "_trainable_variables_indices", None) or getattr(
        optimizer, "_index_dict", {}
    )
    return found


def _slot_lists(optimizer: Any) -> dict[str, Any]:
    length = len(_slot_indices(optimizer))
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and name not in ("_variables", "_trainable_variables")
        and len(value) == length
        and all(each is None or hasattr(each, "assign") for each in value)
        and length
    }
