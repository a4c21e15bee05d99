"""Keeps the parts of a tensor in memory in the order of the whole.

PyTorch chooses kernels above us, by the strides of the whole tensor. A kernel for attention takes for granted
that the last dimension lies densely; given a part that does not, it reads other numbers, and says nothing. So
every part keeps the whole's order of dimensions, which also lets views of the whole be views of the part.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

__all__ = ["dense_strides", "in_order", "is_dense", "put_in_order"]


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides of a dense tensor of this shape whose dimensions lie in the order of other strides."""
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        found[dim] = step
        step *= max(shape[dim], 1)
    return found


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor fills a stretch of memory without gaps and overlaps."""
    dense = dense_strides(shape, strides)
    if 0 in shape:
        return True
    return all(size <= 1 or a == b for size, a, b in zip(shape, strides, dense, strict=True))


def in_order(part: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a part lies in memory as the whole with this shape and these strides does."""
    dims = [dim for dim in range(len(shape)) if part.shape[dim] > 1]
    if part.numel() == 0:
        return True
    for dim in dims:
        dense, own = strides[dim], part.stride(dim)
        if (dense == 1 and own != 1) or (dense == 0) != (own == 0):
            return False
    dims.sort(key=lambda dim: (-strides[dim], dim))
    own_strides = [part.stride(dim) for dim in dims]
    return all(a >= b for a, b in pairwise(own_strides))


def put_in_order(part: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of a part that lies in memory as the whole with these strides does."""
    copy = part.new_empty_strided(tuple(part.shape), dense_strides(part.shape, strides))
    return copy.copy_(part)
