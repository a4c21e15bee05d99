"""Callbacks of Keras that write files: over ranks the first one writes them."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from shardwright.comm.joining.process_group import tell_all
from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.whole import whole_model


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


def joined_by_all(run: KerasRun, callbacks: Any) -> Any:
    """The callbacks of ``fit``, with one like each ``ModelCheckpoint`` that the first rank alone has.

    All ranks save together, and the first one writes: ``if rank == 0: callbacks.append(...)``.
    Collective over all ranks.
    """
    if run.mesh.world_size == 1 or isinstance(callbacks, tf.keras.callbacks.CallbackList):
        return callbacks
    kind = tf.keras.callbacks.ModelCheckpoint
    own = list(tf.nest.flatten([] if callbacks is None else callbacks))
    mine = [_settings(each) for each in own if isinstance(each, kind)]
    first, *others = tell_all(mine)
    for rank, settings in enumerate(others, 1):
        if len(settings) > len(first):
            raise UsageError(
                f"rank {rank} has a ModelCheckpoint that rank 0 does not have. All ranks save the model "
                "together, and rank 0 writes: give it to rank 0, or to all ranks, with the same settings."
            )
    return own if len(mine) == len(first) else [*own, *(kind(**each) for each in first if each not in mine)]


def _settings(checkpoint: Any) -> dict[str, Any]:
    """What another ``ModelCheckpoint`` that saves at the same times is made with."""
    names = ("filepath", "monitor", "save_best_only", "save_weights_only", "save_freq")
    larger = getattr(checkpoint.monitor_op, "__name__", "") == "greater"
    mode = getattr(checkpoint, "mode", "max" if larger else "min")
    settings = {name: getattr(checkpoint, name) for name in names}
    # Also where an earlier fit has found it: another one would save at other times.
    return {"mode": mode, "initial_value_threshold": checkpoint.best, **settings}


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
