"""Parts of torch.distributed without a public name: what for, and the torch versions they were tried on.

==============================  ==========================================================  ============
name                            what for                                                    tried on
==============================  ==========================================================  ============
``_create_work_from_future``    FSDP2 waits for work of torch's own class only, and C++     2.13
                                can wait for it without the interpreter
``ProcessGroup._register_``     gloo for a group that torch.distributed does not know        2.13
``backend``
==============================  ==========================================================  ============
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.futures import Future

__all__ = ["finished_work", "gloo_group", "work_of"]


def work_of(future: "Future[Any]") -> dist.Work:
    """The work that is done when a future is."""
    work: dist.Work = _create_work_from_future(future)
    return work


def finished_work(result: list[Tensor]) -> dist.Work:
    """Work that is done."""
    future: Future[Any] = Future()
    future.set_result(result)
    return work_of(future)


def gloo_group(store: Store, rank: int, num_ranks: int, *, timeout_s: float) -> dist.ProcessGroup:
    """A process group of gloo that torch.distributed does not know; collective over its ranks.

    Args:
        store: of these ranks, and for this group alone.
        rank: of this process in the group.
        num_ranks: of the group.
        timeout_s: how long to wait for a rank at most.
    """
    group = dist.ProcessGroup(store, rank, num_ranks)
    backend = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=timeout_s))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
