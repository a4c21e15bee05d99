"""Experts of a model, of which each rank has some; those whose weights are stacked.

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

::

    tokens: own ones ──all-gather──► all ──► own experts ──► summands ──reduce-scatter──► tokens: own ones

All ranks route their own tokens, and gather tokens and routes. Each computes what its experts make of all
tokens: routes to experts of other ranks point behind its last one, where code of transformers expects them.
What leaves the module is a sum over the ranks. Where most tokens have no expert on most ranks, each goes to
the ranks of its experts instead (`exchange`).

- `stacked`: all weights of a kind in one tensor, as in transformers 5. Tokens are gathered, or go to the
  ranks of their experts (`exchange`).
- `listed`: modules of a list, in a loop, as in transformers 4, the code of DeepSeek and Mistral, and most
  models of one's own. `RoutingCode` runs the code around the loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, part_in, placement_in, whole
from shardwright.torch.tensor_parallel.expert_list import (
    cuts_of_listed_experts,
    put_before,
    run_listed_experts,
)
from shardwright.torch.tensor_parallel.expert_passages import (
    ask_for_the_number,
    entered,
    keep_a_number,
    own_part,
    placed_like,
    summed,
)
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.redistribution import all_to_all
from shardwright.torch.tensor_parallel.spec import Spec, Transfer

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
        pieces = [own.index_select(0, rows) for rows in self.rows]
        return self._exchanged(pieces, self.received, own)

    def back(self, found: Tensor) -> Tensor:
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


_SKIPS = "_is_expert_parallel"
"""Attribute of modules in transformers that skip routes behind their last expert."""


class _OwnExperts(nn.Module):
    """The class of a module of experts has it as its first base: see `run_stacked_experts`."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        all_own = self._parameters.items()
        # Those of an inner group share each expert, as any other layer.
        shared: dict[str, Any] = {
            n: p for n, p in all_own if isinstance(p, DividedTensor) and not p._spec.group.is_inner
        }
        if not shared:
            return super().forward(hidden, index, weights)  # type: ignore[no-any-return]
        spec: Spec = next(iter(shared.values()))._spec
        own = _Own(spec.placement, spec.group, list(shared))  # type: ignore[arg-type]
        parameters = list(shared.values())
        if _are_cut_alike(own.tokens_group, hidden, index, weights) and own.exchanges(index.shape[1]):
            return self._exchanged(own, parameters, hidden, index, weights)  # type: ignore[arg-type]
        given = entered([hidden, index, weights], parameters)
        (total,) = summed([self._of_own(own, given.parts, *given.items)], given, spec.group)
        return total

    def _exchanged(
        self,
        own: "_Own",
        parameters: Sequence[DividedTensor],
        hidden: DividedTensor,
        index: DividedTensor,
        weights: DividedTensor,
    ) -> Tensor:
        """The same where each token goes to the ranks of its experts, and back."""
        tokens = hidden._spec.placement
        assert isinstance(tokens, Cut)
        given = entered([], parameters)
        own_index = whole(part_in(index, own.tokens_group))
        exchange = Exchange(own_index, own.cut, own.group.column, tokens, own.tokens_group)
        (received, of_received), zero = exchange.sent(own_part(hidden), own_part(weights))
        routes = exchange.there(own_index)
        if len(received):
            found = self._of_own(own, given.parts, received, routes, of_received)
        else:
            found = torch.zeros_like(received)  # kernels may want some token
        found = found + given.zero.to(found.dtype) + zero.to(found.dtype)
        return placed_like(exchange.returned(found), hidden)

    def _of_own(
        self, own: "_Own", parts: Sequence[Tensor], tokens: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """What this rank's experts make of tokens; nothing for routes to others."""
        own_index = index - own.first
        is_own = (own_index >= 0) & (own_index < own.number)
        own_index = torch.where(is_own, own_index, own.number)
        weights = torch.where(is_own, weights, torch.zeros_like(weights))
        own_state = {"num_experts": own.number, _SKIPS: True}
        kept = dict(self._parameters), {name: vars(self)[name] for name in own_state}
        try:
            for name, part in zip(own.names, parts, strict=True):
                self._parameters[name] = part  # type: ignore[assignment]
            vars(self).update(own_state)
            return super().forward(tokens, own_index, weights)  # type: ignore[no-any-return]
        finally:
            self._parameters.update(kept[0])
            vars(self).update(kept[1])


class _Own:
    """The experts that this rank has.

    Attributes:
        tokens_group: the ranks that have different tokens.
    """

    def __init__(self, cut: Cut, group: TensorGroup, names: Sequence[str]):
        self.cut, self.group, self.names = cut, group, names
        self.first, self.number = cut.intervals(group.rank)[0][0], cut.length(group.rank)
        self.tokens_group = group.grid or group

    def exchanges(self, num_routes: int) -> bool:
        """Whether tokens go to the ranks of their experts."""
        return exchange_pays(num_routes, self.cut, self.group.num_ranks)


def _are_cut_alike(group: TensorGroup, *tensors: Tensor) -> bool:
    """Whether each rank of a group has the same rows of some tensors."""
    first, *others = (placement_in(each, group) for each in tensors)
    in_rows = isinstance(first, Cut) and first.dim == 0 and tensors[0].is_contiguous()
    return in_rows and all(each == first for each in others)


def cuts_of_stacked_experts(model: nn.Module, *, num_ranks: int) -> dict[str, Cut]:
    """How ranks share the experts of a model: the cuts of parameters, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: Cut.even(0, parameter.shape[0], num_ranks=num_ranks)
        for prefix, module in model.named_modules()
        if _has_stacked_experts(module, num_ranks)
        for name, parameter in module.named_parameters()
    }


def run_stacked_experts(model: nn.Module) -> None:
    """Has modules of experts run on the ranks that have them; whole ones run as they did."""
    for module in model.modules():
        if _has_stacked_experts(module, 1):
            put_before(_OwnExperts, module)


def _has_stacked_experts(module: nn.Module, num_ranks: int) -> bool:
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or count < num_ranks or _SKIPS not in vars(module):
        return False
    parameters: Mapping[str, nn.Parameter] = dict(module.named_parameters())
    own = all(name in module._parameters for name in parameters)
    return own and bool(parameters) and all(each.shape[:1] == (count,) for each in parameters.values())


def cuts_of_experts(model: nn.Module, *, num_ranks: int, units: Iterable[str]) -> dict[str, Cut]:
    """How ranks share the experts of a model: the cuts of parameters, by name."""
    stacked = cuts_of_stacked_experts(model, num_ranks=num_ranks)
    return stacked | cuts_of_listed_experts(model, num_ranks=num_ranks, units=units)


def run_own_experts(model: nn.Module) -> None:
    """Has experts run on the ranks that have them; whole ones run as they did."""
    run_stacked_experts(model)
    run_listed_experts(model)
