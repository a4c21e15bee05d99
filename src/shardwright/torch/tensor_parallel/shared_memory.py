"""Which divided tensors share memory, and how what is pending there is moved for all of them.

A sum over the ranks is pending until it is needed. Then it takes the place of this rank's summand, or goes
to where tensors are cut, for all further uses: where nothing else sees the summand's memory. An alias sees
all of it, so it moves along. `torch.utils.checkpoint` makes one of each tensor that a repeated forward keeps,
and that forward has to take the same way as the first. No other view can move.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, is_nested
from shardwright.torch.tensor_parallel.spec import Spec

__all__ = ["moved_to", "note_view"]

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
