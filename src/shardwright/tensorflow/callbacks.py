"""Callbacks of Keras that write files: over ranks the first one writes them."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.whole_model import whole_model

__all__ = ["callbacks_over_ranks"]


@contextmanager
def callbacks_over_ranks(run: KerasRun) -> Iterator[None]:
    """While it lasts, ranks leave files to the first."""
    with ExitStack() as stack:
        if run.rank > 0:
            logger = tf.keras.callbacks.CSVLogger
            stack.enter_context(_private.replaced(logger, "on_train_begin", _writes_nowhere))
            stack.enter_context(_private.boards_left_to_another())
        stack.enter_context(_private.weights_logged(partial(_log_whole, run)))
        if not _private.uses_keras_3():
            if run.mesh.world_size > 1:
                backup = tf.keras.callbacks.BackupAndRestore
                stack.enter_context(_private.replaced(backup, "on_train_begin", _refused))
        elif run.rank > 0:
            stack.enter_context(_private.backups_left_to_another())
        yield


def _writes_nowhere(original: Any) -> Any:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        self.filename = os.devnull
        original(self, logs)

    return on_train_begin


def _log_whole(run: KerasRun, original: Any) -> Any:
    """``histogram_freq`` of ``TensorBoard`` asks for all weights, on all ranks together."""

    def log_weights(self: Any, epoch: int) -> None:
        with whole_model(run, "the callback TensorBoard"):
            if run.rank == 0:
                original(self, epoch)

    return log_weights


def _refused(_original: Any) -> Any:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        raise UsageError(
            "BackupAndRestore of legacy Keras has each rank write the variables that it holds into one "
            "folder, over those of the others. Save by sw.CheckpointManager in a callback of your own, or "
            "use Keras 3."
        )

    return on_train_begin
