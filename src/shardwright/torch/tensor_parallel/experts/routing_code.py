"""Runs code that calls experts of a list so that their results are added up without exchanges.

::

    found = torch.zeros(tokens, width)                       a sum over the ranks, of zeros so far
    for i in experts that some token takes:                  the routes are whole: all ranks know which
        found.index_add_(0, token, experts[i](x[token]))     a summand is added to a summand

Experts give sums over the ranks, to which only one has something to add. Such a sum stays one where it is
added to another one. An ordinary tensor of zeros cannot become one, so zeros are made as sums in the first
place. Numbers of routes go to all ranks as soon as there are some: what follows from them is the same
everywhere.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.placement import Cut
from shardwright.torch.pytorch.tree import map_tree
from shardwright.torch.tensor_parallel.call import name_of
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, placement_of, whole
from shardwright.torch.tensor_parallel.experts.passages import summand
from shardwright.torch.tensor_parallel.group import TensorGroup

__all__ = ["RoutingCode", "routing_paused"]

# What an empty tensor has may be anything, also zeros.
_ZEROS = frozenset(["zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"])


class _Underway(threading.local):
    """The code underway in this thread."""

    def __init__(self) -> None:
        self.modes: list[RoutingCode] = []


_UNDERWAY = _Underway()


class RoutingCode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, zeros of two dimensions or more are sums over the ranks, and all ranks have whole numbers."""

    def __init__(self, group: TensorGroup):
        super().__init__()  # type: ignore[no-untyped-call]
        self._group = group
        self.is_paused = False

    def __enter__(self) -> "RoutingCode":
        _UNDERWAY.modes.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _UNDERWAY.modes.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if self.is_paused or func.namespace != "aten":
            return results
        if name_of(func) in _ZEROS:
            return self._zeros(results)
        if any(each.alias_info is not None for each in func._schema.returns):
            return results
        return map_tree(_known, results) if _is_divided(results) else results

    def _zeros(self, made: Tensor) -> Tensor:
        if made.dim() < 2 or not made.is_floating_point() or not made.is_contiguous():
            return made
        return summand(torch.zeros(made.shape, dtype=made.dtype, device=made.device), self._group)


def _is_divided(results: Any) -> bool:
    if isinstance(results, tuple | list):
        return any(each.__class__ is DividedTensor for each in results)
    return results.__class__ is DividedTensor


def _known(result: Any) -> Any:
    """Whole numbers on all ranks; any other tensor as it is."""
    is_cut = isinstance(result, Tensor) and isinstance(placement_of(result), Cut)
    return whole(result) if is_cut and not result.is_floating_point() else result


@contextmanager
def routing_paused() -> Iterator[None]:
    """Inside, everything is as elsewhere: an expert computes for itself."""
    paused = [mode for mode in _UNDERWAY.modes if not mode.is_paused]
    for mode in paused:
        mode.is_paused = True
    try:
        yield
    finally:
        for mode in paused:
            mode.is_paused = False
