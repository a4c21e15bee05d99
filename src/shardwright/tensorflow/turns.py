"""Calls of Python in the graph of a ``tf.function``, in the order in which they are written.

What talks to other ranks must do so in the same order on all of them. TensorFlow orders what takes the handle
of one variable, through conditions and loops as well, and nothing else.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["call_in_turn"]


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def call_in_turn(
    function: Callable[..., Sequence[Any]], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Calls a function of tensors when the graph comes to it, behind the calls that are written before it."""

    def now(*given: Any) -> list[Any]:
        return list(function(*given[: len(tensors)]))

    # A graph of TensorFlow 1 cannot take the handle, and has one call.
    turn = [_turn().handle] if tf.inside_function() else []
    made = tf.py_function(now, [*tensors, *turn], list(dtypes))
    # Without results it is an operation.
    return list(made) if isinstance(made, (list, tuple)) else []


@functools.cache
def _turn() -> Any:
    """The variable whose handle each call takes."""
    with tf.init_scope():
        return tf.Variable(0, trainable=False, name="turn")
