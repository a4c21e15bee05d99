"""Placements in pure arithmetic: what is known of a divided tensor, what a change of it sends.

=================== =================== ============================================================
from                to                  what each of n ranks sends
=================== =================== ============================================================
PartialSum          Whole               all-reduce: 2 (n - 1) / n of the tensor
PartialSum          Cut                 reduce-scatter: the summands of each other rank's part
Cut                 Whole               all-gather: the largest part, to each other rank
Cut                 another Cut         all-to-all: what the others will have of this rank's part
Whole               Cut, PartialSum     nothing: it drops what is not its own
Cut                 PartialSum          nothing: zeros where others have the elements
=================== =================== ============================================================

A reshape keeps the order of elements and regroups dimensions: ``(2, 6, 4) -> (2, 3, 2, 4)`` splits one,
``(2, 6, 4) -> (12, 4)`` merges two. A cut survives where each run of the merged or split dimensions is a row
of whole slices of one new dimension.

PyTorch chooses kernels above us, by the strides of the whole tensor. A kernel for attention takes for granted
that the last dimension lies densely; given a part that does not, it reads other numbers, and says nothing. So
every part keeps the whole's order of dimensions, which also lets views of the whole be views of the part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from shardwright.placement import Cut, PartialSum, Placement, Whole

if TYPE_CHECKING:
    from shardwright.torch.tensor_parallel.group import TensorGroup


class Spec:
    """Shape, strides and placement of a divided tensor, and the shape and strides of this rank's part.

    A group makes each of them once (`spec_of`), so they are compared, and hashed, by identity.

    Attributes:
        copied: the tensor is a view for the script, but has memory of its own (see `placing.py`).
        apart: of a part that an inner group cuts: stands for how each rank of the outer group has its own
            part cut; 0 where all have them cut alike, or evenly, each by its own length (see `nesting.py`).
        with_whole: in the key of a decision, stands for a tensor of which all elements are at hand.
    """

    __slots__ = (
        "apart",
        "copied",
        "device",
        "dtype",
        "group",
        "is_cut",
        "is_pending",
        "offset",
        "placement",
        "shape",
        "strides",
        "with_whole",
    )

    def __init__(
        self,
        group: "TensorGroup",
        placement: Placement,
        shape: torch.Size,
        strides: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        copied: bool,
        apart: int,
    ):
        self.group = group
        self.placement = placement
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.dtype = dtype
        self.device = device
        self.copied = copied
        self.apart = apart
        self.is_pending = isinstance(placement, PartialSum)
        self.is_cut = isinstance(placement, Cut)
        self.with_whole = (self, "with whole")

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def __repr__(self) -> str:
        return f"Spec({tuple(self.shape)}, {self.dtype}, {self.placement})"


def local_shape(shape: tuple[int, ...], placement: Placement, rank: int) -> tuple[int, ...]:
    if not isinstance(placement, Cut):
        return tuple(shape)
    dim = placement.dim
    return (*shape[:dim], placement.length(rank), *shape[dim + 1 :])


def spec_of(
    group: "TensorGroup",
    placement: Placement,
    local: Tensor,
    *,
    shape: torch.Size,
    strides: tuple[int, ...],
    offset: int = 0,
    copied: bool = False,
    apart: int = 0,
) -> Spec:
    """The group's description of a tensor with this part. The part's strides count: a view may need them."""
    steps, own_steps = strides, local.stride()
    if (group.is_inner or group.inner is not None) and 1 in local.shape:
        # Where a part has one slice, its step is any number. Ranks with several slices tell such tensors
        # apart by nothing, and made no decision anew where this one did.
        steps, own_steps = _steps(shape, strides), _steps(local.shape, local.stride())
    key = (placement, shape, steps, offset, local.dtype, local.device, own_steps, copied, apart)
    found = group.specs.get(key)
    if found is None:
        found = Spec(group, placement, shape, strides, offset, local.dtype, local.device, copied, apart)
        group.specs[key] = found
    return found


def _steps(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides, without those of dimensions of one slice."""
    return tuple(0 if size == 1 else step for size, step in zip(shape, strides, strict=True))


Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The communication of one change of placement.

    Attributes:
        collective: None if the ranks need nothing from each other.
        num_elements: that this rank sends, counted once for each receiver; an all-reduce counts as a
            reduce-scatter and an all-gather.
    """

    collective: Collective | None
    num_elements: int


_NOTHING = Transfer(None, 0)


def transfer(
    shape: Sequence[int], source: Placement, target: Placement, *, rank: int, num_ranks: int
) -> Transfer:
    """What a rank sends when a tensor changes its placement."""
    if source == target or num_ranks == 1 or isinstance(source, Whole) or isinstance(target, PartialSum):
        return _NOTHING
    size = prod(shape)
    if isinstance(source, PartialSum):
        if isinstance(target, Cut):
            own = target.length(rank) * _slice_size(shape, target.dim)
            return Transfer("reduce_scatter", size - own)
        return Transfer("all_reduce", 2 * (num_ranks - 1) * size // num_ranks)
    slice_size = _slice_size(shape, source.dim)
    if isinstance(target, Cut):
        sent = sum(
            exchanged(shape, source, target, rank, other) for other in range(num_ranks) if other != rank
        )
        return Transfer("all_to_all", sent)
    most = max(source.length(each) for each in range(num_ranks))
    return Transfer("all_gather", (num_ranks - 1) * most * slice_size)


def exchanged(shape: Sequence[int], source: Cut, target: Cut, sender: int, receiver: int) -> int:
    """Elements that one rank has under one cut, and another rank under another cut."""
    if source.dim != target.dim:
        rest = _slice_size(shape, source.dim) // max(shape[target.dim], 1)
        return source.length(sender) * target.length(receiver) * rest
    common = sum(
        max(0, min(b, d) - max(a, c))
        for a, b in source.intervals(sender)
        for c, d in target.intervals(receiver)
    )
    return common * _slice_size(shape, source.dim)


def _slice_size(shape: Sequence[int], dim: int) -> int:
    return prod(size for each, size in enumerate(shape) if each != dim)


# A cut inner dimension, merged into outer ones, repeats its runs. Beyond this the tensor is gathered.
_MAX_RUNS = 4096


def cut_after_reshape(shape: Sequence[int], new_shape: Sequence[int], cut: Cut) -> Cut | None:
    """How a reshaped tensor is cut if each rank reshapes its part."""
    for dims, new_dims in matching_dims(shape, new_shape):
        if cut.dim in dims:
            flat = _flattened([shape[dim] for dim in dims], dims.index(cut.dim), cut)
            found = None if flat is None else _unflattened([new_shape[dim] for dim in new_dims], flat)
            return None if found is None else found.at(new_dims[found.dim])
    return None


def matching_dims(shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of old and new dimensions, in order, that hold as many elements."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        old, new, size, new_size = [], [], 1, 1
        if i < len(shape):
            old, size, i = [i], shape[i], i + 1
        if j < len(new_shape):
            new, new_size, j = [j], new_shape[j], j + 1
        while size != new_size:
            if size < new_size:
                old, size, i = [*old, i], size * shape[i], i + 1
            else:
                new, new_size, j = [*new, j], new_size * new_shape[j], j + 1
        # A size of 1 that the other side lacks joins this group, so that later groups stay in step.
        while i < len(shape) and shape[i] == 1 and not (j < len(new_shape) and new_shape[j] == 1):
            old, i = [*old, i], i + 1
        while j < len(new_shape) and new_shape[j] == 1 and not (i < len(shape) and shape[i] == 1):
            new, j = [*new, j], j + 1
        found.append((old, new))
    return found


def _flattened(sizes: list[int], dim: int, cut: Cut) -> Cut | None:
    """The cut of several dimensions merged into one."""
    outer, inner = prod(sizes[:dim]), prod(sizes[dim + 1 :])
    if outer * len(cut.runs) > _MAX_RUNS:
        return None
    return cut.at(0).times(inner).repeated(outer)


def _unflattened(sizes: list[int], flat: Cut) -> Cut | None:
    """The cut of a dimension split into several."""
    for dim, size in enumerate(sizes):
        outer, inner = prod(sizes[:dim]), prod(sizes[dim + 1 :])
        if size == 1 and len(flat.runs) > 1:
            continue
        block = size * inner
        first = flat.slice(0, block)
        # Each outer index must see the same runs; merged neighbours (r0 r1 | r1 r0) come apart here.
        if outer > 1 and first.repeated(outer) != flat:
            continue
        found = first.over(inner)
        if found is not None:
            return found.at(dim)
    return None


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
