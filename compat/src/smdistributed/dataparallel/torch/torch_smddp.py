"""Makes the backend ``smddp`` known to `torch.distributed`, with Shardwright's collectives behind it.

::

    import smdistributed.dataparallel.torch.torch_smddp
    dist.init_process_group("smddp")

What stock scripts do afterwards (DDP, FSDP, FSDP2, `torch.distributed` itself) goes through it, for tensors
on CUDA devices and on the CPU.
"""

import functools
import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from shardwright.comm.collectives.shardwright_process_group import ShardwrightProcessGroup
from shardwright.comm.joining.process_group import end_with_process
from shardwright.comm.joining.store import joined_tcp_store
from shardwright.comm.launchers import LaunchEnvironment, detect
from smdistributed.dataparallel.torch.rendezvous import tell_torch

BACKEND = "smddp"
_TIMEOUT_S = 300.0  # as PyTorch waits for its own store
_NUMBER_OF_GROUP = itertools.count()


class _SmddpProcessGroup(ShardwrightProcessGroup):
    """Shardwright's process group, under the name that the script asked for."""

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND


def _make(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> dist.ProcessGroup:
    group = _SmddpProcessGroup(store, rank, num_ranks, timeout)
    # Scripts end with or without destroy_process_group(), and with ranks that are ahead of others.
    end_with_process()
    return group


def _store_of_one_host(environment: LaunchEnvironment) -> Store:
    """PyTorch's own would listen on all interfaces."""
    if environment.world_size == 1:
        return HashStore()
    return PrefixStore(f"smddp/{next(_NUMBER_OF_GROUP)}", joined_tcp_store(environment, timeout_s=_TIMEOUT_S))


def _told_where_ranks_meet(init: Callable[..., None]) -> Callable[..., None]:
    """`torch.distributed.init_process_group`, which for this backend goes without a launcher, too."""

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(backend, str) and BACKEND in backend.lower():
            environment = tell_torch()
            is_asked_for = args or kwargs.keys() & {"init_method", "store", "rank", "world_size"}
            if not is_asked_for and environment.num_nodes == 1 and not environment.launcher_serves_store:
                kwargs |= {"rank": environment.rank, "world_size": environment.world_size}
                kwargs["store"] = _store_of_one_host(environment)
        init(backend, *args, **kwargs)

    return init_process_group


def _register() -> None:
    """Makes the name known; nothing happens where it is known already."""
    if hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    core: Any = dist.distributed_c10d
    dist.init_process_group = core.init_process_group = _told_where_ranks_meet(core.init_process_group)


_register()
if detect(os.environ).world_size > 1:
    tell_torch()  # scripts look at LOCAL_RANK before they join
