"""SageMaker's model parallel library for TensorFlow, over `shardwright.tensorflow`.

``import smdistributed.modelparallel.tensorflow as smp``
"""

from shardwright.tensorflow import StepOutput, partition
from smdistributed import horovod
from smdistributed.modelparallel.comm import (
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from smdistributed.modelparallel.groups import (
    CommGroup,
    RankType,
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    get_pp_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    size,
)
from smdistributed.modelparallel.tensorflow import core, utils
from smdistributed.modelparallel.tensorflow.checkpoints import CheckpointManager
from smdistributed.modelparallel.tensorflow.initialization import (
    init,
    is_initialized,
    num_microbatches,
    register_post_partition_hook,
    shutdown,
)
from smdistributed.modelparallel.tensorflow.model import DistributedModel
from smdistributed.modelparallel.tensorflow.step import step
from smdistributed.modelparallel.tensorflow.worker_comm import get_worker_comm

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "WORLD",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "StepOutput",
    "allgather",
    "barrier",
    "broadcast",
    "core",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "get_pp_group",
    "get_worker_comm",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "num_microbatches",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "shutdown",
    "size",
    "step",
    "utils",
]

# The original came with Horovod, which its scripts import beside it.
horovod.provide()
del horovod
