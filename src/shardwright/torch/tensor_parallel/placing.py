"""Places a tensor as asked, or as another one is; what ranks exchanged already is kept at hand.

A sum over the ranks is pending until it is needed. Then it takes the place of this rank's summand, or goes
to where tensors are cut, for all further uses: where nothing else sees the summand's memory. An alias sees
all of it, so it moves along. `torch.utils.checkpoint` makes one of each tensor that a repeated forward keeps,
and that forward has to take the same way as the first. No other view can move.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import WHOLE, Cut, Whole
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    divided,
    is_in,
    is_nested,
    whole,
    wrap,
)
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import replaced
from shardwright.torch.tensor_parallel.spec import Spec, dense_strides, is_dense, spec_of

_ALIASES = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default))


def note_view(view: DividedTensor, base: DividedTensor, func: Any) -> None:
    """Takes note of a view that an operation has made."""
    if func in _ALIASES and not base._seen and _is_pending(base):
        if base._aliases is None:
            base._aliases = [weakref.ref(base)]
        view._aliases = base._aliases
        view._aliases.append(weakref.ref(view))
        return
    for tensor in (view, *base.alike()):
        tensor._seen = True
    if is_nested(base):
        for part in base._local.alike():  # type: ignore[attr-defined]
            part._seen = True


def moved_to(tensor: DividedTensor, local: Tensor, spec: Spec) -> None:
    """Gives a tensor, and its aliases, another part in the place of what was pending."""
    for each in tensor.alike():
        each._local, each._spec = local, spec


def _is_pending(tensor: DividedTensor) -> bool:
    return tensor._spec.is_pending or (is_nested(tensor) and tensor._local._spec.is_pending)  # type: ignore[attr-defined]


def settled(tensor: DividedTensor) -> Tensor:
    """All elements of a partial sum, added up once for all further uses. They must not be written to."""
    spec = tensor._spec

    def summed(data: Tensor) -> Tensor:
        return replaced(
            spec.group,
            data,
            shape=data.shape,
            strides=data.stride(),
            source=spec.placement,
            target=WHOLE,
        )

    if tensor._seen and is_nested(tensor):
        return summed(tensor._local)
    if tensor._seen:
        return spec.group.sums.total(tensor._local, summed)
    # Nothing else sees this memory, so the sum may take its place.
    total = summed(tensor._local)
    own = spec_of(spec.group, WHOLE, total, shape=spec.shape, strides=spec.strides, offset=spec.offset)
    moved_to(tensor, total, own)
    return total


def known_sum(tensor: DividedTensor) -> DividedTensor:
    """Of a partial sum that ranks have added up, the sum; any other tensor as it is. Nobody exchanges."""
    spec = tensor._spec
    is_pending = spec.is_pending and not is_nested(tensor)
    total = spec.group.sums.known(tensor._local) if is_pending else None
    if total is None:
        return tensor
    return wrap(total, spec_of(spec.group, WHOLE, total, shape=spec.shape, strides=spec.strides))


def at_hand(tensor: DividedTensor) -> Tensor:
    """All elements of a cut tensor, kept for others that need them soon; nobody may write to them.

    All ranks of its group call it.
    """
    gathers = tensor._spec.group.gathers
    gather = functools.partial(whole, tensor)
    return gather() if gathers is None else gathers.whole(tensor._local, tensor._spec, gather)


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
