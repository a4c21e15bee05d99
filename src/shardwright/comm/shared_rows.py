"""Memory that all ranks of a group on one host see."""

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.shardwright_process_group import ShardwrightProcessGroup

__all__ = ["memory_of_node"]


def memory_of_node(group: dist.ProcessGroup, num_bytes: int) -> Tensor:
    """Takes memory that the ranks of a group share; collective over it.

    Args:
        group: of ranks on one host, with the backend ``shardwright``.
        num_bytes: how much.

    Returns:
        (num_bytes,) uint8.
    """
    assert isinstance(group, ShardwrightProcessGroup)
    return group.communicator.share_memory(num_bytes)
