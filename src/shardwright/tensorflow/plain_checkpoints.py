"""``tf.train.Checkpoint`` and ``tf.train.CheckpointManager`` themselves, over the ranks of a pipeline.

A rank has values and slots for the variables that it holds alone, so a file of TensorFlow's would have a part
of the model. `sw.CheckpointManager` saves all of it, and these refuse to. They read files: those of a single
process, and those in which `smp.CheckpointManager` has put the part of each rank. One that lacks what a rank
holds now is refused.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from shardwright.errors import CheckpointError, UsageError
from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.variables import tf_variable, variables_by_name

_REMEDY = (
    "Nothing was written. Save by sw.CheckpointManager(checkpoint, directory) on all ranks: it takes the "
    "same tf.train.Checkpoint, and any number of ranks restores it. model.save_weights() on all ranks writes "
    "the weights as one file."
)


@contextmanager
def plain_checkpoints_over_ranks(run: KerasRun) -> Iterator[None]:
    """While it lasts, no rank writes its part of a model for the whole, or takes a part for the whole."""
    of_file, manager = tf.train.Checkpoint, tf.train.CheckpointManager
    with ExitStack() as stack:
        # One rank, too: the file may be a part of a run over several.
        stack.enter_context(_private.replaced(of_file, "read", partial(_read, run)))
        if run.mesh.pipeline > 1 or run.config.shard_optimizer_state:
            for owner, name in ((of_file, "save"), (of_file, "write"), (manager, "save")):
                stack.enter_context(_private.replaced(owner, name, partial(_written, run, owner, name)))
        yield


# ---- writing ----


def _written(run: KerasRun, owner: Any, name: str, original: Any) -> Any:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = self if owner is tf.train.Checkpoint else self.checkpoint
        _refuse_parts(run, f"tf.train.{owner.__name__}.{name}()", checkpoint)
        return original(self, *args, **kwargs)

    return write


def _refuse_parts(run: KerasRun, where: str, checkpoint: Any) -> None:
    """Refuses to write what ranks of a replica have different parts of; alike on all of them."""
    if not run.is_placed or run.variables.are_whole:
        return
    held = tf.train.TrackableView(checkpoint).descendants()
    has_slots = any(id(each) in run.optimizers_in_parts for each in held)
    if has_slots and run.shared_updates is not None:
        raise UsageError(
            f"{where}: with shard_optimizer_state each replica has slots of the optimizer for a part of the "
            f"variables, and no file would have them all. {_REMEDY}"
        )
    if run.variables.are_left_out:  # by who knows that they are a part
        return
    if has_slots or any(run.variables.holder(each) is not None for each in held):
        raise UsageError(
            f"{where} would write the variables that rank {run.rank} holds, and other ranks hold the rest. "
            f"{_REMEDY}"
        )


# ---- reading ----


def _read(run: KerasRun, original: Any) -> Any:
    def read(self: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
        _check_soon(run, self, save_path)
        with run.variables.left_out():  # TensorFlow asks for the names of values by writing them
            return original(self, save_path, *args, **kwargs)

    return read


def _check_soon(run: KerasRun, checkpoint: Any, save_path: Any) -> None:
    """Checks a file that is about to be read, now or when the layers have their ranks."""
    if save_path is None or run.keras_model is None or run.variables.are_whole:
        return
    path = os.fspath(save_path)
    if not tf.io.gfile.exists(f"{path}.index"):
        return  # TensorFlow says so
    graph = _private.saved_graph(path)  # somebody may remove the file before the first step
    if graph is None:
        return
    if run.is_placed:
        _check(run, checkpoint, path, graph)
    else:
        run.after_placement.append(lambda: _check(run, checkpoint, path, graph))


def _check(run: KerasRun, checkpoint: Any, path: str, graph: Any) -> None:
    """Refuses a file without values of variables that this rank holds, or with slots of others."""
    found: dict[int, list[_private.SavedObject]] = {}
    goes_by_position = False
    for held, saved in _private.saved_objects(checkpoint, graph):
        found.setdefault(id(tf_variable(held)), []).append(saved)
        goes_by_position |= saved.num_slots > 0 and isinstance(held, tuple(_private.optimizer_bases()))
    lacking, is_whole = [], run.shared_updates is not None
    for name, variable in variables_by_name(run.keras_model).items():
        there = found.get(id(tf_variable(variable)), [])
        if run.variables.is_remote(variable):
            is_whole |= any(each.has_value for each in there)
        elif not all(each.has_value for each in there):
            lacking.append(name)
        # Keras 3 has a list of the variables that an optimizer updates.
        goes_by_position |= len({each.number for each in there}) > 1
    if lacking:
        raise CheckpointError(
            f"{path} has no value for {lacking[0]}"
            + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else "")
            + f", which rank {run.rank} holds now: it was saved by another rank, or with another partition. "
            'Restore the file of this rank, with the plan of the run that saved it: sw.init("plan.json"). '
            "Checkpoints of sw.CheckpointManager go with any plan."
        )
    if goes_by_position and is_whole:
        raise CheckpointError(
            f"{path} has an optimizer with slots for variables that rank {run.rank} does not update. "
            "TensorFlow goes by their positions, so other variables would get them. Restore it in one "
            "process, and save it there: by sw.CheckpointManager, whose checkpoints any number of ranks "
            'restores, or without the optimizer by model.save_weights("model.weights.h5").'
        )
