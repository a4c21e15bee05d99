"""The data parallel library for ``model.fit`` of Keras."""

from smdistributed.dataparallel.tensorflow import (
    Compression,
    DistributedOptimizer,
    ReduceOp,
    allreduce,
    broadcast,
    broadcast_global_variables,
    init,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from smdistributed.dataparallel.tensorflow.keras import callbacks

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "ReduceOp",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
