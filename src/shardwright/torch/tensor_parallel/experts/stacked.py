"""Runs experts whose weights are stacked (a first dimension counts them) on the ranks that have them.

::

    tokens: own ones ──all-gather──► all ──► own experts ──► summands ──reduce-scatter──► tokens: own ones

All ranks route their own tokens, and gather tokens and routes. Each computes what its experts make of all
tokens: routes to experts of other ranks point behind its last one, where code of transformers expects them.
What leaves the module is a sum over the ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor
from shardwright.torch.tensor_parallel.experts.class_before import put_before
from shardwright.torch.tensor_parallel.experts.passages import entered, summed
from shardwright.torch.tensor_parallel.spec import Spec

__all__ = ["cuts_of_stacked_experts", "run_stacked_experts"]

_SKIPS = "_is_expert_parallel"
"""Attribute of modules in transformers that skip routes behind their last expert."""


class _OwnExperts(nn.Module):
    """The class of a module of experts has it as its first base: see `run_stacked_experts`."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What the experts make of tokens.

        Args:
            hidden: tokens, (T, H).
            index: the experts of each token, (T, K).
            weights: of their results, (T, K).
        """
        own = self._parameters.items()
        shared: dict[str, Any] = {n: p for n, p in own if isinstance(p, DividedTensor)}
        if not shared:
            return super().forward(hidden, index, weights)  # type: ignore[no-any-return]
        spec: Spec = next(iter(shared.values()))._spec
        cut, group = spec.placement, spec.group
        assert isinstance(cut, Cut)
        first = cut.intervals(group.rank)[0][0]
        num_own = cut.length(group.rank)
        given = entered([hidden, index, weights], list(shared.values()))
        tokens, own_index, of_tokens = given.items
        own_index = own_index - first
        is_own = (own_index >= 0) & (own_index < num_own)
        own_index = torch.where(is_own, own_index, num_own)
        of_tokens = torch.where(is_own, of_tokens, torch.zeros_like(of_tokens))
        own_state = {"num_experts": num_own, _SKIPS: True}
        kept = dict(self._parameters), {name: vars(self)[name] for name in own_state}
        try:
            for name, part in zip(shared, given.parts, strict=True):
                self._parameters[name] = part  # type: ignore[assignment]
            vars(self).update(own_state)
            found = super().forward(tokens, own_index, of_tokens)
        finally:
            self._parameters.update(kept[0])
            vars(self).update(kept[1])
        (total,) = summed([found], given, group)
        return total


def cuts_of_stacked_experts(model: nn.Module, *, num_ranks: int) -> dict[str, Cut]:
    """How ranks share the experts of a model: the cuts of parameters, by name.

    Args:
        model: any module.
        num_ranks: that share them.
    """
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
