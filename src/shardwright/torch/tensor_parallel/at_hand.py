"""Sums and wholes that ranks have exchanged already, kept for further uses."""

import functools

from torch import Tensor

from shardwright.placement import WHOLE
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    is_nested,
    whole,
    wrap,
)
from shardwright.torch.tensor_parallel.redistribution import replaced
from shardwright.torch.tensor_parallel.shared_memory import moved_to
from shardwright.torch.tensor_parallel.spec import spec_of

__all__ = ["at_hand", "known_sum", "settled"]


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
