"""Shardwright for TensorFlow: ``import shardwright.tensorflow as sw``."""

try:
    import tensorflow as _tensorflow
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "shardwright.tensorflow needs TensorFlow. Install it: pip install 'shardwright[tensorflow]'"
    ) from error

from shardwright.comm.collectives.backend import register_backend
from shardwright.run.context import is_initialized
from shardwright.run.joining import shutdown
from shardwright.run.ranks import (
    barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    size,
)
from shardwright.tensorflow.checkpoints import CheckpointManager
from shardwright.tensorflow.keras_run import delayed_initialization
from shardwright.tensorflow.model import DistributedModel
from shardwright.tensorflow.outputs import StepOutput
from shardwright.tensorflow.startup import init
from shardwright.tensorflow.step import step
from shardwright.tensorflow.units import partition

__all__ = [
    "CheckpointManager",
    "DistributedModel",
    "StepOutput",
    "barrier",
    "delayed_initialization",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "shutdown",
    "size",
    "step",
]

register_backend()
del register_backend, _tensorflow
