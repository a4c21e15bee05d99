"""``smp.core``: ranks and barriers, where older scripts look for them."""

from smdistributed.modelparallel.torch.comm import barrier, dp_barrier, mp_barrier
from smdistributed.modelparallel.torch.groups import (
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
from smdistributed.modelparallel.torch.initialization import init, is_initialized

__all__ = [
    "barrier",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "size",
    "tp_rank",
    "tp_size",
]
