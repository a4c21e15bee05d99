"""Parts of a model outside of steps: ``decoder.predict(x)``, ``encoder(x)``, ``layer.get_weights()``.

A part has variables that other ranks hold. All ranks come to such a call together, and have the values of the
part for as long as it lasts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.whole_model import whole_model

__all__ = ["parts_over_ranks"]


@contextmanager
def parts_over_ranks(run: KerasRun) -> Iterator[None]:
    """While it lasts, layers and models that a wrapped one is made of can be called on all ranks."""

    def make(name: str) -> Callable[[Any], Any]:
        def around(original: Any) -> Any:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if not _has_parts_elsewhere(run, self, name):
                    return original(self, *args, **kwargs)
                where = f"{self.name}{'' if name == '__call__' else f'.{name}'}()"
                with whole_model(run, where, self.variables):
                    return original(self, *args, **kwargs)

            return method

        return around

    with _private.parts_called(make):
        yield


def _has_parts_elsewhere(run: KerasRun, part: Any, name: str) -> bool:
    """Whether a call reads variables of several ranks, and is no step of the wrapped model."""
    if not run.is_placed or run.mesh.pipeline == 1 or run.is_tracing or run.variables.are_whole:
        return False
    if (part is run.keras_model and name != "__call__") or not tf.executing_eagerly():
        return False
    return any(run.variables.holder(each) is not None for each in part.variables)
