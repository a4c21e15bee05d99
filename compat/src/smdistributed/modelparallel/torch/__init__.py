"""SageMaker's model parallel library for PyTorch, over `shardwright.torch`.

``import smdistributed.modelparallel.torch as smp``
"""

from shardwright.torch import (
    dp_rank,
    dp_size,
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
from smdistributed.modelparallel.torch.initialization import (
    init,
    is_initialized,
    is_tracing,
    num_microbatches,
    shutdown,
)
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.step import StepOutput, step

__all__ = [
    "DistributedModel",
    "DistributedOptimizer",
    "StepOutput",
    "dp_rank",
    "dp_size",
    "init",
    "is_initialized",
    "is_tracing",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "num_microbatches",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "shutdown",
    "size",
    "state",
    "step",
    "tp_rank",
    "tp_size",
]
