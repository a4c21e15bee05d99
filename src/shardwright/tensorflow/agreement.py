"""Gives all ranks of a replica the batch of its first rank."""

from dataclasses import replace

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.run.batch_broadcast import TensorBroadcast
from shardwright.run.context import Context
from shardwright.tensorflow.batch import Arguments
from shardwright.tensorflow.channels import to_tensorflow, to_torch

__all__ = ["Agreement"]


class Agreement:
    """Compares and shares what ranks of a replica must have in common."""

    def __init__(self, context: Context):
        self._broadcast: TensorBroadcast | None = None
        if context.links.replica is not None:
            self._broadcast = TensorBroadcast(
                context.links.replica, source=context.pipeline_ranks[0], device=context.device
            )

    def on_batch(self, arguments: Arguments) -> Arguments:
        """The arguments, with the first rank's tensors; collective over the replica.

        Ranks that read data in another order would otherwise compute on parts of different batches.
        """
        if self._broadcast is None:
            return arguments
        self.refuse_text(arguments)
        mine = [to_torch(tensor) for tensor in arguments.tensors]
        tensors = self._broadcast(mine)
        if tensors is mine:
            return arguments
        return replace(arguments, tensors=[to_tensorflow(tensor) for tensor in tensors])

    def refuse_text(self, arguments: Arguments) -> None:
        """Refuses text, where other ranks would get it."""
        if self._broadcast is None:
            return
        for tensor, name in zip(arguments.tensors, arguments.names, strict=True):
            if tensor.dtype == tf.string:
                raise UsageError(
                    f"the argument {name} of the step function is text, which ranks cannot send each other. "
                    "Make numbers of it before: dataset.map(lambda x, y: (vectorize(x), y)) in tf.data."
                )
