"""Ranks that are not there: a search and a dry run send nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from shardwright.placement import BetweenUnits
from shardwright.torch.tensor_parallel.deciding import decide
from shardwright.torch.tensor_parallel.group import Prices, TensorGroup

__all__ = ["group_without_ranks", "groups_without_ranks"]


class _NoRanks:
    """Collectives of which only shapes count; the numbers are some that can be computed with."""

    def __init__(self, rank: int, num_ranks: int):
        self.rank, self.num_ranks = rank, num_ranks

    def all_reduce(self, data: Tensor, operation: Literal["sum", "max", "min"]) -> None:
        pass

    def all_gather(self, output: Tensor, data: Tensor) -> None:
        output.view(self.num_ranks, -1).copy_(data)

    def all_to_all(self, output: Tensor, data: Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        output.zero_()


def groups_without_ranks(
    rank: int, num_ranks: int, prices: Prices, between: BetweenUnits | None
) -> TensorGroup:
    """The same for the ranks that share a batch: where they share it in two ways, both groups."""
    if between is None or between.inner_ranks == 1:
        return group_without_ranks(rank, num_ranks, prices)
    place, own = divmod(rank, between.inner_ranks)
    group = group_without_ranks(place, between.num_ranks, replace(prices, sums_wait=True))
    group.holds(group_without_ranks(own, between.inner_ranks, prices))
    experts = group_without_ranks(rank, num_ranks, prices)
    group.share_experts(experts, range(own, num_ranks, between.inner_ranks))
    return group


def group_without_ranks(rank: int, num_ranks: int, prices: Prices) -> TensorGroup:
    """A group of one process that decides, and counts what it would send, as a rank of so many."""
    group = TensorGroup(_NoRanks(rank, num_ranks), decide, prices=prices)
    group.is_alone = True
    return group
