"""Places a tensor as asked, or as another one is, and copies views for the script.

A sum over the ranks is pending until it is needed. Then it takes the place of this rank's summand, or goes
to where tensors are cut, for all further uses: where nothing else sees the summand's memory. An alias sees
all of it, so it moves along. `torch.utils.checkpoint` makes one of each tensor that a repeated forward keeps,
and that forward has to take the same way as the first. No other view can move.

A view of a divided tensor is a view of the rank's part, wherever a part has one. ``x.view(-1)`` of a tensor
cut along its last dimension has none: no rank has a run of the result, so the ranks gather a copy. A script
may still write to either and look at the other, as it may with a true view::

    x (cut)  ──gather, view──►  y (a copy)        y.add_(1)  ──►  y's values go back into x
                                                  x.mul_(2)  ──►  y is gathered anew before its next use

How often the memory of `x` was written is counted only while such a copy exists.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import WHOLE, Cut, PartialSum, Whole
from shardwright.torch._private.tensors import memory_of
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    all_parts,
    divided,
    is_in,
    is_nested,
    local_of,
    part_in,
    whole,
    wrap,
)
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import own_part, replaced
from shardwright.torch.tensor_parallel.spec import Spec, dense_strides, is_dense, spec_of

_ALIASES = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default))


def note_view(view: DividedTensor, base: DividedTensor, func: Any) -> None:
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


class CopiedView:
    """The copy that stands for a view of a divided tensor.

    Attributes:
        local: what this rank has of the copy.
    """

    def __init__(self, base: DividedTensor, replay: Callable[[Tensor], Tensor], local: Tensor, spec: Spec):
        """Args: replay: makes the view of a whole tensor like the base."""
        self.base, self.local, self.spec = base, local, spec
        self._replay = replay
        self._writes = spec.group.writes
        self._memory = memory_of(local_of(base))
        watched = self._writes.setdefault(self._memory, [0, 0])
        watched[0] += 1
        self._seen = watched[1]

    def __del__(self) -> None:
        watched = self._writes[self._memory]
        watched[0] -= 1
        if not watched[0]:
            del self._writes[self._memory]

    def refresh(self) -> None:
        """Copies anew if the base was written since."""
        if self.base._spec.copied:
            self.base._copy.refresh()  # which counts as a write of its memory, if anything changed
        count = self._writes[self._memory][1]
        if self._seen != count:
            self._seen = count
            view = self._replay(all_parts(self.base))
            self.local.copy_(_placed(view, self.spec))
            count_write(self.spec.group, self.local)

    def write_back(self) -> None:
        """Puts the copy's values into the base."""
        spec = self.spec
        values = replaced(
            spec.group,
            self.local,
            shape=spec.shape,
            strides=spec.strides,
            source=spec.placement,
            target=WHOLE,
        )
        base = all_parts(self.base)
        self._replay(base).copy_(values)
        overwrite(self.base, base, spec.group)
        self._seen = self._writes[self._memory][1]


def _placed(view: Tensor, spec: Spec) -> Tensor:
    return replaced(
        spec.group, view, shape=view.shape, strides=view.stride(), source=WHOLE, target=spec.placement
    )


def overwrite(tensor: Tensor, values: Tensor, group: TensorGroup) -> None:
    """Gives a tensor new values, which every rank has, in the memory and the placement that it has."""
    local = part_in(tensor, group)
    if isinstance(tensor, DividedTensor) and tensor._spec.group is group:
        spec = tensor._spec
        if isinstance(spec.placement, Cut):
            values = own_part(values, spec.placement, spec.group.rank)
        elif isinstance(spec.placement, PartialSum) and spec.group.rank != 0:
            values = torch.zeros_like(local)
        if local is not values:
            local.copy_(values)
        count_write(spec.group, local)
        if spec.copied:
            tensor._copy.write_back()


def count_write(group: TensorGroup, local: Tensor) -> None:
    """Notes that memory was written; copies of views of it, and its sum, are stale now."""
    memory = memory_of(local_of(local))
    group.sums.written(memory)
    if group.gathers:
        group.gathers.written(memory)
    watched: Any = group.writes.get(memory)
    if watched is not None:
        watched[1] += 1
