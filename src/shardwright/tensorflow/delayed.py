"""Models whose variables are made on their own rank alone."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import keras_run

__all__ = ["delayed_initialization"]

# Seeds, counters and the like are made at once.
_FEWEST_ELEMENTS = 1024


@contextmanager
def delayed_initialization() -> Iterator[None]:
    """Large variables that are made inside get their values in the first step, on their own rank alone.

    So a model starts that is larger than the memory of a rank. Its layers must be built inside: functional
    models are, and others are by ``model(tf.keras.Input(shape))``. Values are those that they would have had.
    A value that a variable is given before the first step, as by ``load_weights``, is kept in memory until
    then.

    Raises:
        UsageError: `sw.init` was not called.

    Example::

        with sw.delayed_initialization():
            model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
        model = sw.DistributedModel(model)
    """
    run = keras_run()

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        own = None
        if not run.is_placed and tf.executing_eagerly():
            own = _private.made_without_value(options, fewest_elements=_FEWEST_ELEMENTS)
        if own is None:
            return next_creator(**options)
        make = partial(_first_value, options["initial_value"], own.dtype)
        run.variables.delay(own, make, is_tracing=lambda: run.is_tracing)
        return own

    with tf.variable_creator_scope(create):
        yield


def _first_value(make: Callable[[], Any], dtype: Any) -> Any:
    with warnings.catch_warnings():
        # Legacy Keras warns of an initializer that is called again: it gives the same, as it has to here.
        warnings.filterwarnings("ignore", "The initializer .* is unseeded")
        return tf.cast(make(), dtype)
