"""Places a tensor as asked, or as another one is; ranks exchange what they lack of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.placement import Cut, Whole
from shardwright.torch.tensor_parallel.at_hand import settled
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    divided,
    is_in,
    is_nested,
    whole,
    wrap,
)
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.memory_order import dense_strides, is_dense
from shardwright.torch.tensor_parallel.redistribution import replaced
from shardwright.torch.tensor_parallel.spec import Spec, spec_of

__all__ = ["cut_alike", "cut_inside", "part_like", "placed"]


def placed(tensor: Tensor, cut: Cut, group: TensorGroup) -> DividedTensor:
    """A tensor cut so, without history. All ranks of its group call it."""
    if not is_in(tensor, group):
        return divided(tensor.detach(), cut, group)
    assert isinstance(tensor, DividedTensor)
    spec = tensor._spec
    if spec.copied:
        tensor._copy.refresh()
    source = spec.placement
    if source == cut:
        return tensor
    if isinstance(source, Whole):
        return divided(tensor._local.detach(), cut, group)
    if spec.is_pending and not is_nested(tensor) and group.sums.knows(tensor._local):
        return divided(settled(tensor).detach(), cut, group)
    shape, strides = spec.shape, spec.strides
    if not is_dense(shape, strides):
        strides = tuple(dense_strides(shape, strides))
    part = replaced(group, tensor._local, shape=shape, strides=strides, source=source, target=cut)
    return wrap(part, spec_of(group, cut, part, shape=shape, strides=strides))


def part_like(tensor: Tensor, spec: Spec | None) -> Tensor:
    """This rank's part of a tensor cut as another one is; all elements where that is not cut."""
    if spec is None:
        return whole(tensor)
    assert isinstance(spec.placement, Cut)
    return placed(tensor, spec.placement, spec.group)._local


def cut_alike(part: Tensor, spec: Spec, shape: Sequence[int]) -> DividedTensor:
    """A tensor of which this rank has a part, cut as another one is."""
    size = torch.Size(shape)
    strides = tuple(dense_strides(size, torch.empty(size, device="meta").stride()))
    return wrap(part, spec_of(spec.group, spec.placement, part, shape=size, strides=strides))


def cut_inside(part: Tensor) -> Spec | None:
    """How an inner group cuts a rank's part of a tensor; None where it does not."""
    return part._spec if isinstance(part, DividedTensor) and part._spec.is_cut else None
