"""What the data parallel library had of its own before release 1.4.

::

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

    dist.init_process_group()
"""

import os
from enum import Enum
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from shardwright.comm.launchers import detect
from shardwright.errors import UsageError
from smdistributed.dataparallel.torch.torch_smddp import BACKEND


class ReduceOp(Enum):
    """How `all_reduce` makes one tensor of all ranks'."""

    AVERAGE = "AVG"
    SUM = "SUM"
    MIN = "MIN"
    MAX = "MAX"


class group:  # noqa: N801  (as in torch.distributed)
    """The one group that there is: all ranks."""

    WORLD = object()


def is_available() -> bool:
    """Whether this build of PyTorch has `torch.distributed`."""
    return torch_dist.is_available()


def init_process_group() -> None:
    """Joins all ranks that the launcher has started.

    Raises:
        LaunchError: variables of the launcher contradict each other, or the ranks could not meet.
    """
    if torch_dist.is_initialized():
        return
    torch_dist.init_process_group(BACKEND)


def is_initialized() -> bool:
    """Whether `init_process_group` was called."""
    return torch_dist.is_initialized()


def get_world_size(group: Any = group.WORLD) -> int:
    """How many ranks there are."""
    _check(group)
    return torch_dist.get_world_size()


def get_rank(group: Any = group.WORLD) -> int:
    """The number of this rank, from 0."""
    _check(group)
    return torch_dist.get_rank()


def get_local_rank() -> int:
    """The number of this rank on its host, from 0."""
    _check(group.WORLD)
    return detect(os.environ).local_rank


def all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: Any = group.WORLD, async_op: bool = False
) -> Any:
    """Makes a tensor that of all ranks together, in place; on every rank."""
    _check(group)
    reduction = getattr(torch_dist.ReduceOp, ReduceOp(op).value)
    return torch_dist.all_reduce(tensor, op=reduction, async_op=async_op)


def broadcast(tensor: Tensor, src: int = 0, group: Any = group.WORLD, async_op: bool = False) -> Any:
    """Makes a tensor what rank `src` has, in place; on every rank."""
    _check(group)
    return torch_dist.broadcast(tensor, src, async_op=async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = group.WORLD, async_op: bool = False
) -> Any:
    """Fills a list with the tensors of all ranks, by rank; on every rank."""
    _check(group)
    return torch_dist.all_gather(tensor_list, tensor, async_op=async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Sends a part of `input` to each rank, and fills `output` with what comes from each; on every rank."""
    _check(group)
    return torch_dist.all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op=async_op
    )


def barrier(group: Any = group.WORLD, async_op: bool = False) -> Any:
    """Waits for all ranks."""
    _check(group)
    return torch_dist.barrier(async_op=async_op)


def _check(chosen: Any) -> None:
    if chosen is not group.WORLD and chosen is not None:
        raise UsageError(
            f"smdistributed.dataparallel.torch.distributed was given the group {chosen!r}; its only group "
            "is group.WORLD. Leave it out, or use torch.distributed with the backend smddp and new_group."
        )
    if not torch_dist.is_initialized():
        raise UsageError(
            "smdistributed.dataparallel is not initialised. Call "
            "smdistributed.dataparallel.torch.distributed.init_process_group() first, once on every rank."
        )
