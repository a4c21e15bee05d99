"""Runs experts whose weights are stacked (a first dimension counts them) on the ranks that have them.

::

    tokens: own ones ──all-gather──► all ──► own experts ──► summands ──reduce-scatter──► tokens: own ones

All ranks route their own tokens, and gather tokens and routes. Each computes what its experts make of all
tokens: routes to experts of other ranks point behind its last one, where code of transformers expects them.
What leaves the module is a sum over the ranks. Where most tokens have no expert on most ranks, each goes to
the ranks of its experts instead (`exchange`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, part_in, placement_in, whole
from shardwright.torch.tensor_parallel.experts.class_before import put_before
from shardwright.torch.tensor_parallel.experts.exchange import Exchange, exchange_pays
from shardwright.torch.tensor_parallel.experts.passages import entered, own_part, placed_like, summed
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.spec import Spec

__all__ = ["cuts_of_stacked_experts", "run_stacked_experts"]

_SKIPS = "_is_expert_parallel"
"""Attribute of modules in transformers that skip routes behind their last expert."""


class _OwnExperts(nn.Module):
    """The class of a module of experts has it as its first base: see `run_stacked_experts`."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What the experts make of tokens."""
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
    """Whether a module is one of experts, of which each rank can have some."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or count < num_ranks or _SKIPS not in vars(module):
        return False
    parameters: Mapping[str, nn.Parameter] = dict(module.named_parameters())
    own = all(name in module._parameters for name in parameters)
    return own and bool(parameters) and all(each.shape[:1] == (count,) for each in parameters.values())
