"""``tf.train.Checkpoint`` and ``tf.train.CheckpointManager`` themselves, over the ranks of a pipeline.

A rank has values for the variables that it holds alone, and slots for these. So a file of TensorFlow's has a
part of the model, and belongs to its rank::

    rank 0   checkpoint.save("rank-0/ckpt")  ─▶  variables and slots of rank 0
    rank 1   checkpoint.save("rank-1/ckpt")  ─▶  variables and slots of rank 1

All ranks write theirs, each to a path of its own, or none does: where ranks have one path, the last would
replace the others' parts, and where one rank saves alone, these are in no file. A file that lacks what a rank
holds now is refused when it is restored.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf
import torch

from shardwright.comm.message_names import Purpose, listed
from shardwright.comm.missing_ranks import Terms
from shardwright.comm.roll_call import Call
from shardwright.errors import CheckpointError, UsageError
from shardwright.run.joint_calls import meet_each
from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.variables import tf_variable, variables_by_name

__all__ = ["plain_checkpoints_over_ranks"]

_REMEDY_OF_SLOTS = (
    "Save by sw.CheckpointManager(checkpoint, directory) on all ranks: it takes the same "
    "tf.train.Checkpoint, and any number of ranks restores it. model.save_weights() on all ranks writes the "
    "weights as one file."
)
_REMEDY = f'{_REMEDY_OF_SLOTS} Or give each rank a folder of its own: f"{{directory}}/rank-{{sw.rank()}}".'


@contextmanager
def plain_checkpoints_over_ranks(run: KerasRun) -> Iterator[None]:
    """While it lasts, no rank writes its part of a model over another's, or takes a part for the whole."""
    of_file, manager = tf.train.Checkpoint, tf.train.CheckpointManager
    with ExitStack() as stack:
        # One rank, too: the file may be a part of a run over several.
        stack.enter_context(_private.replaced(of_file, "read", partial(_read, run)))
        if run.mesh.pipeline == 1 and not run.config.shard_optimizer_state:
            yield
            return
        for name in ("save", "write"):
            make = partial(_written, run, f"tf.train.Checkpoint.{name}()", _file_of)
            stack.enter_context(_private.replaced(of_file, name, make))
        make = partial(_written, run, "tf.train.CheckpointManager.save()", _folder_of)
        stack.enter_context(_private.replaced(manager, "save", make))
        yield


def _file_of(checkpoint: Any, file_prefix: Any = "", *_args: Any, **_kwargs: Any) -> tuple[Any, str]:
    if tf.is_tensor(file_prefix):
        file_prefix = file_prefix.numpy().decode()
    return checkpoint, os.fspath(file_prefix)


def _folder_of(manager: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, str]:
    """Managers with one folder would also note their files in one place, and remove old ones of others."""
    return manager.checkpoint, os.fspath(manager.directory)


# ---- writing ----


def _written(run: KerasRun, where: str, path_of: Callable[..., tuple[Any, str]], original: Any) -> Any:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint, path = path_of(self, *args, **kwargs)
        if not _has_parts(run, where, checkpoint):
            return original(self, *args, **kwargs)
        _refuse_one_path(run, where, path)
        with run.variables.left_out():
            return original(self, *args, **kwargs)

    return write


def _has_parts(run: KerasRun, where: str, checkpoint: Any) -> bool:
    """Whether ranks of a replica have different parts of what a checkpoint has; the same answer on all."""
    if not run.is_placed or run.variables.are_whole:
        return False
    held = tf.train.TrackableView(checkpoint).descendants()
    has_slots = any(id(each) in run.optimizers_in_parts for each in held)
    if has_slots and run.shared_updates is not None:
        raise UsageError(
            f"{where}: with shard_optimizer_state each replica has slots of the optimizer for a part of the "
            f"variables, and no file would have them all. Nothing was written. {_REMEDY_OF_SLOTS}"
        )
    return has_slots or any(run.variables.holder(each) is not None for each in held)


def _refuse_one_path(run: KerasRun, where: str, path: str) -> None:
    """Refuses a path that ranks of a replica share; collective over them."""
    assert run.links.replica is not None
    ranks, whole = run.replica_ranks, os.path.realpath(path)
    needs = (
        f"{where} writes the variables that rank {run.rank} holds to {whole}. Other ranks hold the rest, so "
        f"ranks {listed(ranks)} have to write theirs, too"
    )
    meet_each([Call(where, ranks, terms=Terms(needs, _REMEDY))])
    digest = hashlib.blake2b(whole.encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, signed=True)])
    told = run.links.replica.gather(mine, Purpose.CHECKPOINT)[:, 0].tolist()
    sharing = [rank for rank, each in zip(ranks, told, strict=True) if told.count(each) > 1]
    if sharing:
        raise UsageError(
            f"{where} has one path on ranks {listed(sharing)}"
            + (f", {whole}" if run.rank in sharing else "")
            + ": each would write the variables that it holds over those of the others. Nothing was "
            f"written. {_REMEDY}"
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
