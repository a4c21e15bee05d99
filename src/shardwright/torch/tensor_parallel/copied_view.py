"""Views for the script that are copies in memory.

A view of a divided tensor is a view of the rank's part, wherever a part has one. ``x.view(-1)`` of a tensor
cut along its last dimension has none: no rank has a run of the result, so the ranks gather a copy. A script
may still write to either and look at the other, as it may with a true view::

    x (cut)  ──gather, view──►  y (a copy)        y.add_(1)  ──►  y's values go back into x
                                                  x.mul_(2)  ──►  y is gathered anew before its next use

How often the memory of `x` was written is counted only while such a copy exists.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import WHOLE, Cut, PartialSum
from shardwright.torch._private import memory_of
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    all_parts,
    local_of,
    part_in,
)
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import own_part, replaced
from shardwright.torch.tensor_parallel.spec import Spec


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
