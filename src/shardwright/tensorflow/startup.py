"""Starts a run; has TensorFlow's own checkpoints, and callbacks that write files, work over ranks.

A rank has values and slots for the variables that it holds alone, so a file of TensorFlow's would have a part
of the model. `sw.CheckpointManager` saves all of it, and these refuse to. They read files: those of a single
process, and those in which `smp.CheckpointManager` has put the part of each rank. One that lacks what a rank
holds now is refused.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf
import torch

from shardwright.comm.joining.process_group import tell_all
from shardwright.config import Config
from shardwright.errors import CheckpointError, UsageError
from shardwright.plan import Plan
from shardwright.run.context import set_context
from shardwright.run.joining import begun, settings_of_call
from shardwright.run.reporting import Facts
from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.optimizer import loss_scales_over_stages, optimizers_over_stages
from shardwright.tensorflow.variables import tf_variable, variables_by_name
from shardwright.tensorflow.whole import parts_over_ranks, whole_model


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


# A step inside of a tf.function waits in one of these threads for pieces that need another.
_FEWEST_THREADS = 2


def init(
    config: "Mapping[str, Any] | Config | Plan | str | os.PathLike[str] | None" = None, **others: Any
) -> None:
    """Starts a run; call it first, once, on every rank, before any operation of TensorFlow.

    Finds the ranks from the environment (torchrun, Slurm, MPI, ... or a single process), joins them, and
    reads the settings, the same as for PyTorch.

    Args:
        config: settings, or a plan, or the path of a plan file.

    Raises:
        UsageError: it was called before, or got settings by keyword.
        ConfigError: a setting is unknown, out of range or contradicts another.
        PlanError: the plan file cannot be used.
    """
    settings, plan = settings_of_call(config, others)
    _set_threads()
    made = begun(settings, plan, kind=KerasRun, facts=_facts, check=refuse_what_is_missing)
    made.cleanup.enter_context(optimizers_over_stages(made))
    made.cleanup.enter_context(loss_scales_over_stages(made))
    made.cleanup.enter_context(callbacks_over_ranks(made))
    made.cleanup.enter_context(parts_over_ranks(made))
    made.cleanup.enter_context(plain_checkpoints_over_ranks(made))
    set_context(made)
    if settings.seed is not None:
        tf.keras.utils.set_random_seed(settings.seed)


def _facts(run: KerasRun) -> Facts:
    return Facts(model=lambda: type(run.keras_model).__name__)


def _set_threads() -> None:
    """One pool of threads for each rank, as PyTorch has it, and never too few for a step in a tf.function."""
    threading = tf.config.threading
    try:
        if threading.get_inter_op_parallelism_threads() < _FEWEST_THREADS:
            threading.set_inter_op_parallelism_threads(_FEWEST_THREADS)
        if threading.get_intra_op_parallelism_threads() == 0:
            threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    except RuntimeError as error:  # TensorFlow has run an operation, and has its threads
        if threading.get_inter_op_parallelism_threads() == 1:
            raise UsageError(
                "inter_op_parallelism_threads is 1 and TensorFlow runs already, so a step inside of a "
                "tf.function would wait for itself. Call sw.init before any operation, or set it to 2."
            ) from error
        warnings.warn(
            "TensorFlow has run operations before sw.init, so ranks may compute with more threads than "
            "there are cores for each. Call sw.init first.",
            stacklevel=3,
        )


def refuse_what_is_missing(run: KerasRun) -> None:
    """Refuses settings that this front end does not heed yet."""
    asked = {
        "tensor_parallel_degree": run.mesh.tensor > 1,
        "context_parallel_degree": run.mesh.context > 1,
        "expert_parallel_degree": run.mesh.expert > 1,
        "offload_activations": run.config.offload_activations is True,
        "sharded_data_parallel_degree": run.mesh.shard > 1,
        "a number as shard_optimizer_state": not isinstance(run.config.shard_optimizer_state, bool),
        "compile": run.config.compile == "on",
        "bf16": run.config.bf16,
        "fp16": run.config.fp16,
        "optimizer_state": run.config.optimizer_state != "as_is",
    }
    wanted = [name for name, is_asked in asked.items() if is_asked]
    if wanted:
        raise UsageError(
            f"{', '.join(wanted)}: not available with TensorFlow in this version. Mixed precision is Keras' "
            "own (tf.keras.mixed_precision.set_global_policy); the others need PyTorch."
        )
