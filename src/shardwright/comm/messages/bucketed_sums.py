"""Sums tensors over ranks in few messages: many gradients share one."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.bucket_size import size_of_buckets

__all__ = ["sums_over"]

_MOST_BUCKET_BYTES = 25 * 2**20


def sums_over(
    group: dist.ProcessGroup | None,
    tensors: Sequence[Tensor],
    *,
    divisor: int = 1,
    most_bytes: int = _MOST_BUCKET_BYTES,
) -> list[Tensor]:
    """The sums of these tensors over the ranks of a group, in memory of their own; collective."""
    found: list[Tensor | None] = [None] * len(tensors)
    pending = []
    for positions in _buckets(tensors, most_bytes):
        packed = torch.cat([tensors[position].reshape(-1) for position in positions])
        if divisor != 1:
            packed /= divisor
        pending.append((positions, packed, dist.all_reduce(packed, group=group, async_op=True)))
    for positions, packed, work in pending:
        if work is not None:
            work.wait()
        parts = torch.split(packed, [tensors[position].numel() for position in positions])
        for position, part in zip(positions, parts, strict=True):
            found[position] = part.clone().view(tensors[position].shape)
    return [each for each in found if each is not None]


def _buckets(tensors: Sequence[Tensor], most_bytes: int) -> list[list[int]]:
    """Positions of the tensors that go in one message: of one type, up to the size of a bucket."""
    most = size_of_buckets(sum(each.nbytes for each in tensors), most=most_bytes)
    found: list[list[int]] = []
    for dtype in sorted({each.dtype for each in tensors}, key=str):
        room = -1
        for position, tensor in enumerate(tensors):
            if tensor.dtype != dtype:
                continue
            if room < tensor.nbytes:
                found.append([])
                room = most
            found[-1].append(position)
            room -= tensor.nbytes
    return found
