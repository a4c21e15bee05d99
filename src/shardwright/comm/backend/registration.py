"""Registers the torch.distributed backend ``shardwright``, whose collectives know shared hosts.

::

    import shardwright.torch                            # makes the name known
    torch.distributed.init_process_group("shardwright")

Stock scripts, DDP and FSDP2 then use its collectives, for tensors on the CPU and on CUDA devices.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwright.comm.backend.name import BACKEND

__all__ = ["register_backend"]


def register_backend() -> None:
    """Makes the name known to torch.distributed; nothing happens where it is known already."""
    if dist.is_available() and not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])


def _make(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> dist.ProcessGroup:
    # Here, because few scripts need it.
    from shardwright.comm.backend.shardwright_process_group import ShardwrightProcessGroup

    return ShardwrightProcessGroup(store, rank, num_ranks, timeout)
