"""What is known of a divided tensor without its data."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.placement import Cut, PartialSum, Placement

if TYPE_CHECKING:
    from shardwright.torch.tensor_parallel.group import TensorGroup

__all__ = ["Spec", "local_shape", "spec_of"]


class Spec:
    """Shape, strides and placement of a divided tensor, and the shape and strides of this rank's part.

    A group makes each of them once (`spec_of`), so they are compared, and hashed, by identity.

    Attributes:
        group: the ranks that share the tensor.
        shape, strides, offset: of the tensor as the script sees it.
        copied: the tensor is a view for the script, but has memory of its own (see `copied_view.py`).
        apart: of a part that an inner group cuts: stands for how each rank of the outer group has its own
            part cut; 0 where all have them cut alike, or evenly, each by its own length (see `nesting.py`).
        is_pending: it is a partial sum.
        is_cut: each rank has a part.
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
        """Elements of the whole tensor."""
        return prod(self.shape)

    def __repr__(self) -> str:
        return f"Spec({tuple(self.shape)}, {self.dtype}, {self.placement})"


def local_shape(shape: tuple[int, ...], placement: Placement, rank: int) -> tuple[int, ...]:
    """Shape of a rank's part."""
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
