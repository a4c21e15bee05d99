"""Sends tokens to the ranks of their experts, and what these make of them back.

::

    rank 0    tokens 0 1 2    ──0 2──►    rank 1, has experts of 0 and 2, and of its own 3
              0 1 2           ◄──0 2──    what they make of 0 and 2, added up where the tokens are
    rank 1    tokens 3 4      ───4───►    rank 0

A token goes to a rank once, with all of its routes, however many of its experts are there. So ranks send no
more than if they gathered all tokens: with K routes over N ranks, a token goes to K of the N - 1 others at
most. How much it is depends on the routes; a plan counts on even ones (`share_of_tokens`).

Where ranks share layers, too, those of a column exchange tokens: they have the same place among those that
share layers, and other tokens. What all columns make of a token is added up afterwards.

Shapes: T a rank's own tokens, M tokens that it gets, K routes of a token, X anything.
"""

from collections.abc import Sequence
from math import comb
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.experts.passages import ask_for_the_number, keep_a_number
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import all_to_all
from shardwright.torch.tensor_parallel.transfer import Transfer

__all__ = ["MOST_SHARE", "Exchange", "exchange_pays", "share_of_tokens"]

MOST_SHARE = 0.7
"""Of its tokens that a rank sends another one. With more, gathering is as short, and one step less."""


def share_of_tokens(num_routes: int, experts: Cut, rank: int) -> float:
    """The share of all tokens that have an expert of a rank, if each expert is as likely as any other.

    >>> share_of_tokens(1, Cut.even(0, 8, num_ranks=4), 0), share_of_tokens(2, Cut.even(0, 4, num_ranks=2), 0)
    (0.25, 0.8333333333333334)
    """
    others = experts.size - experts.length(rank)
    return 1 - comb(others, num_routes) / comb(experts.size, num_routes)


def exchange_pays(num_routes: int, experts: Cut, num_ranks: int) -> bool:
    """Whether ranks send tokens to those of their experts, in the place of gathering all of them."""
    shares = [share_of_tokens(num_routes, experts, rank) for rank in range(num_ranks)]
    return sum(shares) / num_ranks <= MOST_SHARE


class Exchange:
    """Who sends which of its tokens to whom; all ranks of the group make one together."""

    def __init__(self, index: Tensor, experts: Cut, column: Sequence[int], tokens: Cut, group: TensorGroup):
        self.group, self.num_own = group, len(index)
        ranks = range(group.num_ranks)
        if group.is_alone:  # and the routes are not known, or not those of a run
            share = [share_of_tokens(index.shape[1], experts, rank) for rank in column]
            sent = [round(self.num_own * each) for each in share]
            self.rows = [torch.arange(each, device=index.device) for each in sent]
            self.received = [round(tokens.length(rank) * share[group.rank]) for rank in ranks]
            self.received[group.rank] = sent[group.rank]
            _count(group, "all_gather", group.num_ranks * (group.num_ranks - 1), 8)
            return
        owners = torch.full([experts.size], -1, dtype=torch.int64, device=index.device)
        for rank, a, b in experts.bounds():
            if rank in column:
                owners[a:b] = column.index(rank)
        going = owners[index]
        self.rows = [(going == rank).any(1).nonzero().squeeze(1) for rank in ranks]
        counts = torch.tensor([len(each) for each in self.rows], device=index.device)
        of_all = counts.new_empty(group.num_ranks * group.num_ranks)
        _count(group, "all_gather", group.num_ranks * (group.num_ranks - 1), 8)
        group.collectives.all_gather(of_all.view(torch.uint8), counts.view(torch.uint8))
        self.received = of_all.view(group.num_ranks, group.num_ranks)[:, group.rank].tolist()

    def sent(self, *own: Tensor) -> tuple[list[Tensor], Tensor]:
        """Of own tensors (T, X), what this rank gets of all tokens that have an expert here, (M, X)."""
        *found, zero = _There.apply(self, *own)  # type: ignore[no-untyped-call]
        return found, zero

    def returned(self, found: Tensor) -> Tensor:
        """Of what this rank made of tokens (M, X), the sums over ranks for its own tokens, (T, X)."""
        back: Tensor = _Back.apply(self, found)  # type: ignore[no-untyped-call]
        return back

    # ---- without history ----

    def there(self, own: Tensor) -> Tensor:
        """See `sent`; a tensor of any type."""
        pieces = [own.index_select(0, rows) for rows in self.rows]
        return self._exchanged(pieces, self.received, own)

    def back(self, found: Tensor) -> Tensor:
        """See `returned`."""
        sent = [len(rows) for rows in self.rows]
        got = self._exchanged(list(torch.split(found, self.received)), sent, found)
        total = found.new_zeros(self.num_own, *found.shape[1:])
        for rows, summands in zip(self.rows, torch.split(got, sent), strict=True):
            total.index_add_(0, rows, summands)  # one after the other, so that sums are the same each time
        return total

    def _exchanged(self, pieces: Sequence[Tensor], lengths: Sequence[int], like: Tensor) -> Tensor:
        """Sends each rank a piece, and gets so many rows from each."""
        width = like.shape[1:].numel()
        others = sum(each.numel() for rank, each in enumerate(pieces) if rank != self.group.rank)
        _count(self.group, "all_to_all", others, like.element_size())
        counts = [length * width for length in lengths]
        received = all_to_all(self.group, [[each] for each in pieces], counts, like)
        return torch.cat(received).view(sum(lengths), *like.shape[1:])


def _count(group: TensorGroup, collective: Any, num_elements: int, itemsize: int) -> None:
    group.traffic.count(Transfer(collective, num_elements), itemsize)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return *(exchange.there(each) for each in own), own[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(ctx.exchange.back(each.contiguous()) for each in gradients[:-1])


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, found: Tensor) -> Tensor:
        ctx.exchange = exchange
        keep_a_number(ctx, found)
        return exchange.back(found.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ask_for_the_number(ctx)
        return None, ctx.exchange.there(gradients[0].contiguous())
