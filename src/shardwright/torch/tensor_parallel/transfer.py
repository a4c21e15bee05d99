"""What a change of placement sends, in pure arithmetic: the plan's bytes and the run's come from here.

=================== =================== ============================================================
from                to                  what each of n ranks sends
=================== =================== ============================================================
PartialSum          Whole               all-reduce: 2 (n - 1) / n of the tensor
PartialSum          Cut                 reduce-scatter: the summands of each other rank's part
Cut                 Whole               all-gather: the largest part, to each other rank
Cut                 another Cut         all-to-all: what the others will have of this rank's part
Whole               Cut, PartialSum     nothing: it drops what is not its own
Cut                 PartialSum          nothing: zeros where others have the elements
=================== =================== ============================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from shardwright.placement import Cut, PartialSum, Placement, Whole

__all__ = ["Collective", "Transfer", "exchanged", "transfer"]

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The communication of one change of placement.

    Attributes:
        collective: None if the ranks need nothing from each other.
        num_elements: that this rank sends, counted once for each receiver; an all-reduce counts as a
            reduce-scatter and an all-gather.
    """

    collective: Collective | None
    num_elements: int


_NOTHING = Transfer(None, 0)


def transfer(
    shape: Sequence[int], source: Placement, target: Placement, *, rank: int, num_ranks: int
) -> Transfer:
    """What a rank sends when a tensor changes its placement."""
    if source == target or num_ranks == 1 or isinstance(source, Whole) or isinstance(target, PartialSum):
        return _NOTHING
    size = prod(shape)
    if isinstance(source, PartialSum):
        if isinstance(target, Cut):
            own = target.length(rank) * _slice_size(shape, target.dim)
            return Transfer("reduce_scatter", size - own)
        return Transfer("all_reduce", 2 * (num_ranks - 1) * size // num_ranks)
    slice_size = _slice_size(shape, source.dim)
    if isinstance(target, Cut):
        sent = sum(
            exchanged(shape, source, target, rank, other) for other in range(num_ranks) if other != rank
        )
        return Transfer("all_to_all", sent)
    most = max(source.length(each) for each in range(num_ranks))
    return Transfer("all_gather", (num_ranks - 1) * most * slice_size)


def exchanged(shape: Sequence[int], source: Cut, target: Cut, sender: int, receiver: int) -> int:
    """Elements that one rank has under one cut, and another rank under another cut."""
    if source.dim != target.dim:
        rest = _slice_size(shape, source.dim) // max(shape[target.dim], 1)
        return source.length(sender) * target.length(receiver) * rest
    common = sum(
        max(0, min(b, d) - max(a, c))
        for a, b in source.intervals(sender)
        for c, d in target.intervals(receiver)
    )
    return common * _slice_size(shape, source.dim)


def _slice_size(shape: Sequence[int], dim: int) -> int:
    return prod(size for each, size in enumerate(shape) if each != dim)
