"""``smp.CheckpointManager``: TensorFlow's own checkpoints, one folder for each rank of a replica.

::

    directory/mp_rank_0/checkpoint, ckpt-1.index, ckpt-1.data-00000-of-00001, ...
    directory/mp_rank_1/...

A rank saves the variables and slots that it holds. Old checkpoints go when all ranks of the replica have
written the new one, so that a crash leaves one that all of them have.
"""

import os
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from shardwright.errors import CheckpointError
from shardwright.run.joint_calls import meet
from shardwright.tensorflow.keras_run import keras_run
from smdistributed.modelparallel.comm import allgather
from smdistributed.modelparallel.groups import CommGroup
from smdistributed.modelparallel.ranks_of_run import present_run
from smdistributed.modelparallel.tensorflow.utils import folder_of


class CheckpointManager:
    """Saves and restores what a ``tf.train.Checkpoint`` has; every rank makes one.

    Args:
        directory: the same for all ranks. Those of one host share it.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: "str | os.PathLike[str]" = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ):
        if not isinstance(checkpoint, tf.train.Checkpoint):
            checkpoint = tf.train.Checkpoint(model=checkpoint)
        self.checkpoint = checkpoint
        self.directory = folder_of(directory, present_run().rank)
        self._name = checkpoint_name
        self._status: Any = None
        self._manager = tf.train.CheckpointManager(
            checkpoint, str(self.directory), max_to_keep, checkpoint_name=checkpoint_name
        )

    @property
    def checkpoints(self) -> list[str]:
        """The checkpoints of this rank, oldest first."""
        return list(self._manager.checkpoints)

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest of this rank; None where there is none."""
        found: str | None = self._manager.latest_checkpoint
        return found

    def save(self, *args: Any, **kwargs: Any) -> str:
        """Saves everything as it is now; call it on all ranks of a replica, between two steps.

        The first replica writes. Others, which have the same values, only count.

        Returns:
            The path of this rank's checkpoint, without its endings.
        """
        current = present_run()
        if current.data_rank:
            number = int(self.checkpoint.save_counter.assign_add(1))
            return str(self.directory / f"{self._name}-{number}")

        def written(_path: str) -> None:  # called before old ones are removed
            meet("smp.CheckpointManager.save()", current.replica_ranks)

        options = tf.train.CheckpointOptions(experimental_write_callbacks=[written])
        with keras_run().variables.left_out():  # those that other ranks hold
            return str(self._manager.save(*args, **{"options": options, **kwargs}))

    def restore(self, restore_prefix: "str | os.PathLike[str] | None" = None) -> Any:
        """Restores a checkpoint; call it on all ranks of a replica, before the first step or between two.

        Args:
            restore_prefix: ``"ckpt-2"``, or a path that ends so; None for the newest that all ranks of the
                replica have. If there is none, nothing happens.

        Raises:
            CheckpointError: some ranks have it and others lack it, or it was saved with another partition.
        """
        name = None if restore_prefix is None else Path(restore_prefix).name
        mine = self._saved()
        told = allgather((present_run().rank, mine), CommGroup.MP_GROUP)
        common = set(mine).intersection(*(saved for _, saved in told))
        wanted = max(common, default=None, key=_number) if name is None else name
        if wanted is None or wanted not in common:
            self._refuse_parts(told, name)
            self._status = self.checkpoint.restore(None)
            return self._status
        # Refused where it lacks what this rank holds: now, or when the first step has placed the layers.
        self._status = self.checkpoint.restore(str(self.directory / wanted))
        return self._status

    def expect_partial(self) -> "CheckpointManager":
        """Has TensorFlow not warn of values in the restored checkpoint that nothing takes."""
        if self._status is not None:
            self._status.expect_partial()
        return self

    def _saved(self) -> list[str]:
        """Names of the checkpoints whose files are there, also where a crash kept them from being noted."""
        pattern = re.compile(rf"({re.escape(self._name)}-\d+)\.index")
        names = (pattern.fullmatch(path.name) for path in self.directory.glob("*.index"))
        return [name[1] for name in names if name is not None]

    def _refuse_parts(self, told: list[tuple[int, list[str]]], name: str | None) -> None:
        """Refuses what some ranks have, and others lack."""
        has = [rank for rank, saved in told if (name in saved if name is not None else saved)]
        lack = [rank for rank, _ in told if rank not in has]
        if has and (lack or name is None):
            what = name or "any checkpoint of the same number"
            raise CheckpointError(
                f"the ranks of a replica do not all have {what} in {self.directory.parent}: "
                f"rank {', '.join(map(str, has))} has {'it' if name else 'some'}"
                + (f", rank {', '.join(map(str, lack))} has none" if lack else "")
                + ". On several hosts, bring the folders together: smp.utils.send_checkpoint_files()."
            )


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
