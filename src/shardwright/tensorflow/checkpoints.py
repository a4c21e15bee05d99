"""Checkpoints of a Keras model over ranks: each rank writes what it holds, the first one commits.

The files are those of `shardwright.checkpoint`. A crash in the middle leaves the checkpoints from before.
Each file has a checksum, and any number of ranks restores what any other has saved.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder, refuse_one_checkpoint
from shardwright.checkpoint.saved import (
    SavedCheckpoint,
    TensorPart,
)
from shardwright.checkpoint.tensor_file import StoredTensor
from shardwright.checkpoint.tensor_index import MODEL
from shardwright.errors import CheckpointError, UsageError
from shardwright.run.joint_calls import first_cause_named, meet, on_every_rank
from shardwright.run.saving import CheckpointDraft, RankSnapshot, SaveUnderWay, new_draft
from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import keras_run
from shardwright.tensorflow.variables import tf_variable, variables_by_name
from shardwright.text import shortened

__all__ = ["CheckpointManager"]

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class CheckpointManager:
    """Saves and restores the model, its optimizers and other variables; every rank makes one.

    Args:
        checkpoint: a ``tf.train.Checkpoint`` of the wrapped model, optimizers, variables and objects with
            ``variables``, such as metrics; or the wrapped model alone.
        directory: a folder that all hosts share.
        max_to_keep: how many checkpoints stay; None for all. Old ones go when the newest is verified.

    Attributes:
        checkpoint: what was given.
        directory: the folder.

    Raises:
        UsageError: the wrapped model is not among them, or something has no variables.

    Example::

        manager = sw.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), "checkpoints")
        manager.restore()                       # the newest, if there is one
        ...
        manager.save()
    """

    def __init__(self, checkpoint: Any, directory: str | os.PathLike[str], *, max_to_keep: int | None = None):
        self.checkpoint = checkpoint
        self.directory = Path(directory)
        refuse_one_checkpoint(self.directory)
        if max_to_keep is not None and max_to_keep < 1:
            raise UsageError(f"max_to_keep is {max_to_keep}, and at least one checkpoint must stay.")
        self._run = keras_run()
        self._keep = max_to_keep
        self._disk = Disk()
        self._folder = CheckpointFolder(self.directory, disk=self._disk)
        self._objects = _objects_of(checkpoint)
        model = self._run.keras_model
        if model is None or all(each is not model for each in self._objects.values()):
            raise UsageError(
                "the checkpoint has not the model that sw.DistributedModel has wrapped. Give it that: "
                "tf.train.Checkpoint(model=model, optimizer=optimizer)."
            )

    # ---- saving ----

    def save(self) -> str:
        """Saves everything as it is now; call it on all ranks, between two steps.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: it cannot be saved; the checkpoints from before stay.
        """
        run = self._run
        with first_cause_named(run):
            meet("CheckpointManager.save()")
            snapshot = on_every_rank(run, self._snapshot)
            draft = run.from_first_rank(self._new_draft)
            under_way = SaveUnderWay(run, draft, snapshot, folder=self._folder, disk=self._disk)
            under_way.wait()
            problem, remark = run.from_first_rank(lambda: (under_way.problem, under_way.remark))
        if problem is not None:
            raise CheckpointError(
                f"the checkpoint was not saved in {self.directory}: {problem.rstrip('.')}. Those from before "
                "stay."
            )
        if remark and run.rank == 0:
            warnings.warn(f"{self.directory}: {remark}", stacklevel=2)
        return str(self.directory / draft.name)

    def _new_draft(self) -> CheckpointDraft:
        commits = self._folder.commits()
        return new_draft(self._folder, commits[-1].step + 1 if commits else 1, keep=self._keep)

    def _snapshot(self) -> RankSnapshot:
        """What this rank saves."""
        parts = [_part(key, variable) for key, variable in self._mine().items()]
        return RankSnapshot(parts, self._parameters(), {})

    def _mine(self) -> dict[str, Any]:
        """What this rank saves, by name; the first replica saves for all, but for slots that others have."""
        run = self._run
        mine: dict[str, Any] = {}
        if run.data_rank > 0:
            if run.shared_updates is not None:
                for name, value in self._objects.items():
                    if _is_optimizer(value):
                        mine |= {key: slot for key, (slot, _) in self._of_optimizer(name, value)[0].items()}
            return mine
        first = run.pipeline_rank == 0
        for name, value in self._objects.items():
            if value is run.keras_model:
                for key, variable in variables_by_name(value).items():
                    holder = run.variables.holder(variable)
                    if first if holder is None else holder == run.pipeline_rank:
                        mine[f"{MODEL}{key}"] = variable
            elif _is_optimizer(value):
                slots, others = self._of_optimizer(name, value)
                mine |= {key: slot for key, (slot, of) in slots.items() if self._saves_slot(of)}
                mine |= others if first else {}
            elif first:
                mine |= _numbered(name, value)
        return mine

    def _saves_slot(self, variable: Any) -> bool:
        holder = self._run.variables.holder(variable)
        return holder == self._run.pipeline_rank if holder is not None else self._run.pipeline_rank == 0

    def _of_optimizer(self, name: str, optimizer: Any) -> tuple[dict[str, tuple[Any, Any]], dict[str, Any]]:
        """Slots, each with the variable of the model that has it, and the other variables; by name."""
        slots: dict[str, tuple[Any, Any]] = {}
        for key, variable in variables_by_name(self._run.keras_model).items():
            for slot_name, slot in _private.slots_of(optimizer, variable).items():
                slots[f"{name}/{slot_name}/{key}"] = slot, variable
        taken = {id(tf_variable(slot)) for slot, _ in slots.values()}
        others = {
            f"{name}/{variable.name.partition(':')[0].rpartition('/')[2]}": variable
            for variable in _private.optimizer_variables(optimizer)
            if id(tf_variable(variable)) not in taken and not _private.is_slot(optimizer, variable)
        }
        return slots, others

    def _parameters(self) -> set[str]:
        model = self._run.keras_model
        trained = {id(tf_variable(variable)) for variable in model.trainable_variables}
        return {
            f"{MODEL}{key}" for key, v in variables_by_name(model).items() if id(tf_variable(v)) in trained
        }

    # ---- restoring ----

    @property
    def checkpoints(self) -> list[str]:
        """The folders of the checkpoints, oldest first."""
        return [str(self.directory / commit.name) for commit in self._folder.commits()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The folder of the newest; None where there is none."""
        return next(reversed(self.checkpoints), None)

    def restore(self, name: str | os.PathLike[str] | None = None) -> str | None:
        """Restores a checkpoint, saved by any number of ranks; call it on all ranks, between two steps.

        Slots of an optimizer that has made no update yet get their values when it makes them.

        Args:
            name: of the checkpoint, or its folder; None for the newest.

        Returns:
            The folder of the checkpoint; None where none was asked for and there is none.

        Raises:
            CorruptCheckpointError: it is damaged; nothing was restored.
            CheckpointError: there is none of that name, or it is of another model.
        """
        run = self._run
        wanted = None if name is None else Path(name).name
        with first_cause_named(run):
            meet("CheckpointManager.restore()")
            found = run.from_first_rank(lambda: self._verified(wanted))
            if found is None:
                return None
            saved = self._folder.open(found, verify=False)
            values = on_every_rank(
                run, lambda: [(each, _value(saved, key)) for key, each in self._targets(saved).items()]
            )
        for variable, value in values:
            variable.assign(value)
        for each, optimizer in self._objects.items():
            if _is_optimizer(optimizer) and not _private.has_slots(optimizer):
                run.slots_to_load[id(optimizer)] = _Slots(self, saved, each)
        return str(saved.path)

    def _verified(self, name: str | None) -> str | None:
        """The name of the checkpoint, whose files are as they were written; on the first rank."""
        if name is None and not self._folder.commits():
            return None
        saved = self._folder.open(name)
        saved.check()
        return saved.path.name

    def _targets(self, saved: SavedCheckpoint) -> dict[str, Any]:
        """The variables of this rank that get values, by name."""
        model = self._run.keras_model
        names = {f"{MODEL}{key}": variable for key, variable in variables_by_name(model).items()}
        if not names:
            raise CheckpointError(
                "the model has no variables yet. Call it, or make a step, before CheckpointManager.restore()."
            )
        there = {key for key in saved.index.tensors if key.startswith(MODEL)}
        if there != set(names):
            differing = set(names) - there, there - set(names)
            lacking, beside = (shortened(sorted(each)) or "none" for each in differing)
            raise CheckpointError(
                f"{saved.path} is of another model: it lacks {lacking} of this one's variables, and has "
                f"{beside} beside."
            )
        targets = {key: v for key, v in names.items() if not self._run.variables.is_remote(v)}
        for name, value in self._objects.items():
            if value is model:
                continue
            if _is_optimizer(value):
                slots, others = self._of_optimizer(name, value)
                targets |= {k: s for k, (s, of) in slots.items() if not self._run.variables.is_remote(of)}
                targets |= others
            else:
                targets |= _numbered(name, value)
        return targets


class _Slots:
    """The slots of an optimizer that has none yet."""

    def __init__(self, manager: CheckpointManager, saved: SavedCheckpoint, name: str):
        saved.map_files()  # also where somebody removes the checkpoint meanwhile
        self._manager, self._saved, self._name = manager, saved, name

    def __call__(self, optimizer: Any, variables: list[Any]) -> None:
        """Makes the slots for these variables, with their values."""
        if not any(key.startswith(f"{self._name}/") for key in self._saved.index.tensors):
            return
        with tf.init_scope():
            _private.make_slots(optimizer, variables)
            slots, _ = self._manager._of_optimizer(self._name, optimizer)
            for key, (slot, _) in slots.items():
                if key in self._saved.index.tensors:
                    slot.assign(_value(self._saved, key))


def _objects_of(checkpoint: Any) -> dict[str, Any]:
    """What a checkpoint has, by name."""
    if not isinstance(checkpoint, tf.train.Checkpoint):
        return {"model": checkpoint}
    children = tf.train.TrackableView(checkpoint).children(checkpoint)
    found = {name: each for name, each in children.items() if name != "save_counter"}
    for name, each in found.items():
        if not isinstance(each, tf.Variable) and not hasattr(each, "variables"):
            raise UsageError(
                f"{name} of the checkpoint is a {type(each).__name__}, which has no variables. Leave it out."
            )
    return found


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, tuple(_private.optimizer_bases()))


def _numbered(name: str, value: Any) -> dict[str, Any]:
    """The variables of an object that all ranks have."""
    if isinstance(value, tf.Variable):
        return {name: value}
    return {f"{name}/{number}": variable for number, variable in enumerate(value.variables)}


def _part(name: str, variable: Any) -> TensorPart:
    """A variable, copied."""
    value = np.ascontiguousarray(tf_variable(variable).numpy())
    dtype = _NAMES.get(value.dtype.name)
    if dtype is None:
        raise CheckpointError(f"{name} has the type {value.dtype.name}, which cannot be saved")
    shape = tuple(tf_variable(variable).shape.as_list())
    data: Any = value.reshape(-1).view(np.uint8) if value.size else b""
    return TensorPart(
        name, whole=shape, box=Box.whole(shape), stored=StoredTensor(dtype, shape, memoryview(data))
    )


def _value(saved: SavedCheckpoint, name: str) -> Any:
    """A whole tensor of a checkpoint."""
    entry = saved.entry(name)
    dtype = tf.dtypes.as_dtype(_DTYPES[entry.dtype]).as_numpy_dtype
    value = np.empty(entry.shape, dtype)
    for overlap in saved.whole(name):
        piece = np.frombuffer(overlap.stored.data, dtype).reshape(overlap.stored.shape)
        value[overlap.target.slices] = piece[overlap.source.slices]
    return value
