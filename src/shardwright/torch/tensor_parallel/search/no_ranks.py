"""Ranks that are not there: a search and a dry run send nothing."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from shardwright.torch.tensor_parallel.deciding import decide
from shardwright.torch.tensor_parallel.group import Prices, TensorGroup

__all__ = ["group_without_ranks"]


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


def group_without_ranks(rank: int, num_ranks: int, prices: Prices) -> TensorGroup:
    """A group of one process that decides, and counts what it would send, as a rank of so many."""
    group = TensorGroup(_NoRanks(rank, num_ranks), decide, prices=prices)
    group.is_alone = True
    return group
