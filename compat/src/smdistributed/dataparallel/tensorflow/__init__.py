"""SageMaker's data parallel library for TensorFlow 2, over Shardwright's collectives.

::

    import smdistributed.dataparallel.tensorflow as sdp
    sdp.init()
    ...
    tape = sdp.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        sdp.broadcast_variables(model.variables, root_rank=0)
        sdp.broadcast_variables(optimizer.variables(), root_rank=0)
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from shardwright.errors import UsageError
from smdistributed.dataparallel import data_ranks as _ranks
from smdistributed.dataparallel.data_ranks import local_rank, local_size, rank, size
from smdistributed.dataparallel.tensorflow import collectives as _collectives
from smdistributed.dataparallel.tensorflow import gradients as _gradients
from smdistributed.dataparallel.tensorflow.collectives import Reduction as ReduceOp
from smdistributed.dataparallel.tensorflow.compression import Compression

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ReduceOp",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "get_worker_comm",
    "init",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shutdown",
    "size",
]


def init() -> None:
    """Joins all ranks that the launcher has started; call it once."""
    if _ranks.have_joined():
        raise UsageError("smdistributed.dataparallel.tensorflow.init was called before. Call it once.")
    _ranks.join()


def shutdown() -> None:
    """Leaves the other ranks."""
    _ranks.leave()


def get_worker_comm() -> NoReturn:
    """Refused: it is the communicator of mpi4py that the original was started with."""
    raise UsageError(
        "get_worker_comm gives a communicator of mpi4py, and these ranks need none. What scripts ask it "
        "for is here: rank() and size(), broadcast(tensor, root), allreduce(tensor) for tensors; of objects, "
        "hvd.allgather_object and hvd.broadcast_object (import horovod.tensorflow as hvd)."
    )


def allreduce(
    tensor: Any,
    param_index: int = 0,
    num_params: int = 1,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
) -> Any:
    """A tensor over all ranks.

    Args:
        param_index: number of the gradient; the order of the calls counts, so it changes nothing.
        num_params: number of gradients; it changes nothing.
    """
    return _collectives.reduced(tensor, op, compression=compression)


def oob_allreduce(tensor: Any, compression: Any = Compression.none, op: ReduceOp = ReduceOp.AVERAGE) -> Any:
    """The mean of a tensor over all ranks, for metrics."""
    if op is not ReduceOp.AVERAGE:
        raise UsageError("oob_allreduce averages. For another reduction, call allreduce.")
    return _collectives.reduced(tensor, op, compression=compression)


def overlap(tensor: Any) -> Any:
    """The tensor itself: the original hid the work of all-reduce behind it under XLA."""
    return tf.identity(tensor)


def broadcast(tensor: Any, root: int) -> Any:
    """The tensor of one rank, on all."""
    return _collectives.broadcast([tensor], root)[0]


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Gives variables the values of one rank."""
    _collectives.broadcast_variables(list(variables), root_rank)


def broadcast_global_variables(root_rank: int) -> Any:
    """Gives all variables of a graph of TensorFlow 1 the values of one rank; an operation."""
    if tf.executing_eagerly():
        raise UsageError(
            "broadcast_global_variables works in graphs of TensorFlow 1. Eagerly, call "
            "broadcast_variables(model.variables, root_rank=0)."
        )
    variables = tf.compat.v1.global_variables()
    values = _collectives.broadcast(variables, root_rank)
    return tf.group(*(v.assign(value) for v, value in zip(variables, values, strict=True)))


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all variables when a session of TensorFlow 1 has made them."""

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self._root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Adds the broadcast to the graph."""
        self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self._operation)


def DistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    persistent: bool = False,
    watch_accessed_variables: bool = True,
) -> Any:
    """A ``tf.GradientTape`` whose gradients are those of all ranks together.

    Args:
        device_dense: changes nothing, and so do `device_sparse`, `persistent` and `watch_accessed_variables`.
    """
    return _gradients.distributed_tape(
        gradtape, _gradients.over_ranks(op, compression=compression, sparse_as_dense=sparse_as_dense)
    )


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    bucket_cap_mb: int = 25,
) -> Any:
    """A Keras optimizer that averages gradients over all ranks before it applies them.

    Args:
        name: changes nothing, and so do `use_locking`, `device_dense`, `device_sparse` and `bucket_cap_mb`:
            the library sizes its messages itself.
    """
    return _gradients.distributed_optimizer(
        optimizer, _gradients.over_ranks(op, compression=compression, sparse_as_dense=sparse_as_dense)
    )
