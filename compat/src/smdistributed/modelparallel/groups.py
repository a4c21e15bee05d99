"""The grid of ranks: groups and ranks in them, as numbers and as groups of `torch.distributed`.

::

    PP   the stages of one replica            TP   ranks that share every layer of a stage
    RDP  ranks with the same parameters       DP   ranks of one stage: RDP and TP together
    MP   one whole replica: PP and TP         WORLD
"""

from enum import Enum
from typing import Any

import torch.distributed as dist

from shardwright.errors import UsageError
from shardwright.mesh import Axes
from smdistributed.modelparallel.ranks_of_run import present_run, ranks_of_run

__all__ = [
    "CommGroup",
    "RankType",
    "dp_rank",
    "dp_size",
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
    "kind_of",
    "local_rank",
    "local_size",
    "members",
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


class CommGroup(Enum):
    """A kind of group: that of this rank is meant."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """In which group a rank is counted."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


def kind_of(group: Any) -> Axes:
    """The kind of group that a `CommGroup` or a `RankType` names."""
    if isinstance(group, CommGroup | RankType):
        kind: Axes = group.value
        return kind
    raise UsageError(
        f"{group!r} is not a group. Use one of {', '.join(f'smp.{name}' for name in CommGroup.__members__)}, "
        f"and to count ranks one of {', '.join(f'smp.RankType.{name}' for name in RankType.__members__)}."
    )


def members(group: Any) -> tuple[int, ...]:
    """World ranks of this rank's group, in the order of their ranks in it."""
    current = present_run()
    return current.mesh.group(kind_of(group), current.rank)


def _rank_in(kind: Axes) -> int:
    current = present_run()
    return current.mesh.group_rank(kind, current.rank)


def _size_of(kind: Axes) -> int:
    return present_run().mesh.group_size(kind)


def rank() -> int:
    """This rank among all, from 0."""
    return present_run().rank


def size() -> int:
    """Number of ranks."""
    return present_run().mesh.world_size


def local_rank() -> int:
    """This rank on its host, from 0."""
    return present_run().local_rank


def local_size() -> int:
    """Ranks on this host."""
    return present_run().local_size


def mp_rank() -> int:
    """Position in the replica, from 0."""
    return _rank_in("mp")


def mp_size() -> int:
    """Ranks that hold one replica together."""
    return _size_of("mp")


def dp_rank() -> int:
    """Position among the ranks of this stage, from 0: the shard of the data to read."""
    return _rank_in("dp")


def dp_size() -> int:
    """Ranks of one stage."""
    return _size_of("dp")


def pp_rank() -> int:
    """Position in the pipeline, from 0."""
    return _rank_in("pp")


def pp_size() -> int:
    """Ranks in the pipeline."""
    return _size_of("pp")


def tp_rank() -> int:
    """Position among the ranks that share every layer of this stage, from 0."""
    return _rank_in("tp")


def tp_size() -> int:
    """Ranks that share every layer of a stage."""
    return _size_of("tp")


def rdp_rank() -> int:
    """Position among the ranks that hold the same parameters, from 0."""
    return _rank_in("rdp")


def rdp_size() -> int:
    """Ranks that hold the same parameters."""
    return _size_of("rdp")


def get_mp_group() -> list[int]:
    """World ranks of this replica."""
    return list(members(CommGroup.MP_GROUP))


def get_dp_group() -> list[int]:
    """World ranks of this stage, of all replicas."""
    return list(members(CommGroup.DP_GROUP))


def get_pp_group() -> list[int]:
    """World ranks of this pipeline, by stage."""
    return list(members(CommGroup.PP_GROUP))


def get_tp_group() -> list[int]:
    """World ranks that share every layer of this stage, this one included."""
    return list(members(CommGroup.TP_GROUP))


def get_rdp_group() -> list[int]:
    """World ranks that hold the same parameters."""
    return list(members(CommGroup.RDP_GROUP))


def get_world_process_group() -> dist.ProcessGroup:
    """The group of `torch.distributed` of all ranks."""
    return _process_group(CommGroup.WORLD)


def get_mp_process_group() -> dist.ProcessGroup:
    """The group of `torch.distributed` of this replica."""
    return _process_group(CommGroup.MP_GROUP)


def get_dp_process_group() -> dist.ProcessGroup:
    """The group of `torch.distributed` of this stage."""
    return _process_group(CommGroup.DP_GROUP)


def get_pp_process_group() -> dist.ProcessGroup:
    """The group of `torch.distributed` of this pipeline."""
    return _process_group(CommGroup.PP_GROUP)


def get_tp_process_group() -> dist.ProcessGroup:
    """The group of `torch.distributed` of the ranks that share every layer of this stage."""
    return _process_group(CommGroup.TP_GROUP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """The group of `torch.distributed` of the ranks with the same parameters."""
    return _process_group(CommGroup.RDP_GROUP)


def _process_group(group: CommGroup) -> dist.ProcessGroup:
    current = present_run()
    ranks = members(group)
    if len(ranks) == current.mesh.world_size:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if len(ranks) == 1:
        return ranks_of_run.alone()
    groups = current.groups
    known = {
        CommGroup.MP_GROUP: groups.model,
        CommGroup.PP_GROUP: groups.pipeline,
        CommGroup.TP_GROUP: groups.tensor,
        CommGroup.RDP_GROUP: groups.data,
        CommGroup.DP_GROUP: ranks_of_run.stage_group or groups.data or groups.tensor,
    }
    found = known[group]
    assert found is not None
    return found
