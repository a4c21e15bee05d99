"""Parts of torch.distributed without a public name: what for, and the torch versions they were tried on.

==================================  ======================================================  ========
name                                what for                                                tried on
==================================  ======================================================  ========
``ProcessGroup._register_backend``  gloo for a group that torch.distributed does not know   2.13
==================================  ======================================================  ========
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["all_gather_single", "gloo_group", "reduce_scatter_single"]


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


# Names before torch 2.13, which warns of the old ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
