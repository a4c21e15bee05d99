"""Optimizers of Keras: where they take gradients, and what they keep for each variable."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import clip_ops

from shardwright.tensorflow._private.functions import replaced
from shardwright.tensorflow._private.keras import uses_keras_3
from shardwright.tensorflow._private.loss_scales import scaled_optimizer


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
