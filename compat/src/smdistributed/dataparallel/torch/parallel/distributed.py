"""`DistributedDataParallel` as it was before release 1.4."""

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwright.errors import UsageError
from smdistributed.dataparallel.torch.distributed import group


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """A model whose replicas, one on each rank, average their gradients.

    ``with model.no_sync():`` lets them accumulate before.

    Args:
        device_ids, output_device: its device, as PyTorch's class of this name takes it.
        broadcast_buffers: whether each forward begins with the buffers of rank 0.

    Raises:
        UsageError: there are no ranks yet, or a group of some ranks is asked for.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: int = 25,
    ):
        if process_group not in (None, group.WORLD):
            raise UsageError(
                "this DistributedDataParallel is for all ranks, but a process_group was given. Leave it out, "
                "or use torch.nn.parallel.DistributedDataParallel with the backend smddp."
            )
        if not dist.is_initialized():
            raise UsageError(
                "DistributedDataParallel needs ranks. Call "
                "smdistributed.dataparallel.torch.distributed.init_process_group() first, once on every rank."
            )
        options = {"device_ids": device_ids, "output_device": output_device, "bucket_cap_mb": bucket_cap_mb}
        with warnings.catch_warnings():
            # PyTorch 2.13 has a new name for a part of what this one does, and warns where it is given.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            super().__init__(module, broadcast_buffers=broadcast_buffers, **options)
