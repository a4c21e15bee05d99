"""What a rank saves of a tensor that a tensor-parallel group shares, and the whole that all parts make.

::

    cut 0 (r0:2 r1:2 r0:1 r1:1)      pieces of rank 0: rows 0 to 1 of the tensor, row 4
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.boxes import Box
from shardwright.placement import Cut
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    divided,
    local_of,
    placement_of,
    whole,
)
from shardwright.torch.tensor_parallel.spec import Spec

__all__ = ["all_elements", "cut_of", "in_whole", "joined", "pieces", "placed_like"]


def cut_of(tensor: Tensor) -> Cut | None:
    """How ranks share a tensor; None for a whole one."""
    placement = placement_of(tensor)
    return placement if isinstance(placement, Cut) else None


def pieces(tensor: DividedTensor) -> Iterator[tuple[Box, Tensor]]:
    """The pieces that this rank has of a cut tensor: where each lies, and a view of its elements."""
    local = tensor._local.detach()
    return in_whole(Box.whole(local.shape), local, tensor._spec)


def in_whole(box: Box, elements: Tensor, spec: Spec) -> Iterator[tuple[Box, Tensor]]:
    """The pieces of a box of this rank's part of a cut tensor: where each lies in the whole, and a view."""
    cut, start = spec.placement, 0
    assert isinstance(cut, Cut)
    dim = cut.dim
    first, last = box.offset[dim], box.offset[dim] + box.shape[dim]
    for a, b in cut.intervals(spec.group.rank):
        low, high = max(first, start), min(last, start + b - a)
        if low < high:
            offset, shape = list(box.offset), list(box.shape)
            offset[dim], shape[dim] = a + low - start, high - low
            yield Box(tuple(offset), tuple(shape)), elements.narrow(dim, low - first, high - low)
        start += b - a


def all_elements(state: Any) -> Any:
    """A tree with all tensors whole; the tree itself where they are. All ranks of the group call it."""
    items, structure = flatten(state)
    if not any(isinstance(item, DividedTensor) for item in items):
        return state
    return structure.rebuild([whole(item) if isinstance(item, DividedTensor) else item for item in items])


def joined(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole tensor."""
    taken = [0] * len(parts)
    pieces = []
    for rank, length in cut.runs:
        pieces.append(parts[rank].narrow(cut.dim, taken[rank], length))
        taken[rank] += length
    return torch.cat(pieces, dim=cut.dim)


def placed_like(whole: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, of which each rank keeps what it has of another of the same shape."""
    if isinstance(whole, DividedTensor) or not isinstance(other, DividedTensor) or whole.shape != other.shape:
        return whole
    spec = other._spec
    return divided(whole.to(local_of(other).device), spec.placement, spec.group)
