"""What a walk behind a loss finds, and reads in nodes of autograd's graph: see `loss_walk`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwright.torch._private.modules import saved_by
from shardwright.torch._private.tensors import FakeTensor


class Reduction(IntEnum):
    """How the losses of microbatches make that of their batch."""

    UNKNOWN = 0  # counted as a mean
    MEAN = 1  # weighed by samples
    WEIGHTED = 2  # weighed by what counts in each
    SUM = 3
    NEITHER = 4


class Rows(IntEnum):
    """A tensor that is no value of the batch yet."""

    FIXED = 0  # of parameters alone
    ROWS = 1  # as many for each sample
    PICKED = 2  # some of them, by values


@dataclass(frozen=True, slots=True)
class Term:
    """A value of the batch.

    Attributes:
        count: gives how much counts in it; for a weighted mean.
        is_fixed: it is a value of parameters alone, the same in each microbatch.
    """

    reduction: Reduction
    shape: tuple[int, ...] = ()
    count: Callable[[], float] | None = None
    is_fixed: bool = False
    reason: str = ""
    divisor: float = 1.0


Flow: TypeAlias = "Rows | tuple[Term, ...]"


class Neither(Exception):  # noqa: N818  (no error: an answer)
    """The loss is a function of the whole batch."""


def is_leaf(node: Any) -> bool:
    return name_of_node(node) == "AccumulateGrad"


def labels_of(node: Any) -> float:
    """How many labels count, each by the weight of its class."""
    if saved_by(node, "weight") is not None:
        return number_in(saved_by(node, "total_weight"))
    ignored = saved_by(node, "ignore_index")
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    return number_in((saved_by(node, "target") != ignored).sum())


def name_of_node(node: Any) -> str:
    """``Mean`` for ``MeanBackward1``."""
    return _name_in(node.name())


@functools.lru_cache(maxsize=512)
def _name_in(name: str) -> str:
    return name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def dims_of(dims: Sequence[int], num_dims: int) -> set[int]:
    """Dims as autograd saves them, counted from 0: those below 0 are large there."""
    return {(dim - 2**64 if dim >= 2**63 else dim) % max(num_dims, 1) for dim in dims}


def is_number(divisor: Tensor) -> bool:
    """Whether a divisor was a number of Python's, and no tensor."""
    if isinstance(divisor, FakeTensor) or divisor.dim():
        return False
    small = {torch.int64: torch.int8, torch.float64: torch.float16}.get(divisor.dtype)
    return small is not None and torch.result_type(divisor, torch.zeros((), dtype=small)) is small


def number_in(tensor: Tensor) -> float:
    """A number of Python's; a rank waits for its GPU."""
    return float(tensor.detach().item())
