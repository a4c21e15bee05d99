"""Recognises reductions: operations that make one number of many, and of how many."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_batch_norm_in_training", "reduced_elements"]

aten = torch.ops.aten

_REDUCTIONS = frozenset(
    getattr(aten, name)
    for name in ("mean", "sum", "var", "std", "var_mean", "std_mean", "aminmax", "amin", "amax", "min", "max")
)
_BATCH_NORMS = frozenset(
    getattr(aten, name)
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit")
    if hasattr(aten, name)
)
_TRAINING = 5  # the argument of batch norms


def is_batch_norm_in_training(func: Any, args: Sequence[Any]) -> bool:
    """Whether it is a batch norm that computes statistics; an instance norm is one of a single sample."""
    is_batch_norm = getattr(func, "overloadpacket", None) in _BATCH_NORMS
    return is_batch_norm and len(args) > _TRAINING and args[_TRAINING] is True and args[0].shape[0] > 1


def reduced_elements(func: Any, args: Sequence[Any]) -> int:
    """The number of elements that an operation reduces to one; 0 if it reduces nothing.

    >>> reduced_elements(aten.mean.dim, (torch.ones(4, 3, 5, 5), [0, 2, 3]))
    100
    >>> reduced_elements(aten.mean.default, (torch.ones(4, 3),))
    12
    """
    if is_batch_norm_in_training(func, args):
        return int(args[0].numel() // max(1, args[0].shape[1]))
    if getattr(func, "overloadpacket", None) not in _REDUCTIONS or not isinstance(args[0], Tensor):
        return 0
    x, dims = args[0], args[1] if len(args) > 1 else None
    if isinstance(dims, int):
        dims = [dims]
    if not x.dim() or not isinstance(dims, list | tuple) or not dims:
        return x.numel()
    return math.prod(x.shape[dim] for dim in dims)
