"""SageMaker's model parallel library for PyTorch, over `shardwright.torch`.

``import smdistributed.modelparallel.torch as smp``
"""

from shardwright.torch import is_tracing
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
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from smdistributed.modelparallel.torch import (
    amp,
    core,
    exceptions,
    model,
    nn,
    optimizers,
    patches,
    sharded_data_parallel_checkpoint,
    state_mod,
    utils,
)
from smdistributed.modelparallel.torch.checkpoints.resuming import resume_from_checkpoint
from smdistributed.modelparallel.torch.checkpoints.saving import save_checkpoint
from smdistributed.modelparallel.torch.creation import (
    delay_param_initialization,
    model_creation,
    partition,
    set_partition,
    set_tensor_parallelism,
    tensor_parallelism,
    tp_register,
    tp_register_with_module,
)
from smdistributed.modelparallel.torch.initialization import (
    init,
    is_initialized,
    num_microbatches,
    shutdown,
)
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.recomputation import set_activation_checkpointing
from smdistributed.modelparallel.torch.save_load import load, save
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.step import StepOutput, step

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "core",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "exceptions",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "num_microbatches",
    "optimizers",
    "partition",
    "patches",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "sharded_data_parallel_checkpoint",
    "shutdown",
    "size",
    "state",
    "state_mod",
    "step",
    "tensor_parallelism",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "utils",
]
