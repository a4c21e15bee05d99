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

from shardwright.placement import PARTIAL_SUM, Cut
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of, whole, wrap
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.spec import Spec, spec_of

__all__ = ["cuts_of_experts", "run_own_experts"]

_SKIPS = "_is_expert_parallel"
"""Attribute of modules in transformers that skip routes behind their last expert."""


class _OwnExperts(nn.Module):
    """The class of a module of experts has it as its first base: see `run_own_experts`."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What the experts make of tokens.

        Args:
            hidden: tokens, (T, H).
            index: the experts of each token, (T, K).
            weights: of their results, (T, K).
        """
        parts = {n: p for n, p in self._parameters.items() if isinstance(p, DividedTensor)}
        if not parts:
            return super().forward(hidden, index, weights)  # type: ignore[no-any-return]
        spec: Spec = next(iter(parts.values()))._spec  # type: ignore[union-attr]
        cut, group = spec.placement, spec.group
        assert isinstance(cut, Cut)
        first = cut.intervals(group.rank)[0][0]
        num_own = cut.length(group.rank)
        tokens, of_tokens = _Gathered.apply(hidden, group), _Gathered.apply(weights, group)  # type: ignore[no-untyped-call]
        own_index = whole(index) - first
        is_own = (own_index >= 0) & (own_index < num_own)
        own_index = torch.where(is_own, own_index, num_own)
        of_tokens = torch.where(is_own, of_tokens, torch.zeros_like(of_tokens))
        own_state = {"num_experts": num_own, _SKIPS: True}
        kept = dict(self._parameters), {name: vars(self)[name] for name in own_state}
        try:
            for name, part in parts.items():
                self._parameters[name] = _Part.apply(part)  # type: ignore[no-untyped-call]
            vars(self).update(own_state)
            found = super().forward(tokens, own_index, of_tokens)
        finally:
            self._parameters.update(kept[0])
            vars(self).update(kept[1])
        summed: Tensor = _Summed.apply(found, group)  # type: ignore[no-untyped-call]
        return summed


def cuts_of_experts(model: nn.Module, *, num_ranks: int) -> dict[str, Cut]:
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


def run_own_experts(model: nn.Module) -> None:
    """Has modules of experts run on the ranks that have them; whole ones run as they did."""
    for module in model.modules():
        if _has_stacked_experts(module, 1) and not isinstance(module, _OwnExperts):
            module.__class__ = _class_of(type(module))


_CLASSES: dict[type, type] = {}


def _class_of(user_class: type) -> type:
    if user_class not in _CLASSES:
        names = {"__module__": user_class.__module__, "__qualname__": user_class.__qualname__}
        _CLASSES[user_class] = type(user_class.__name__, (_OwnExperts, user_class), names)
    return _CLASSES[user_class]


def _has_stacked_experts(module: nn.Module, num_ranks: int) -> bool:
    """Whether a module is one of experts, of which each rank can have some."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or count < num_ranks or _SKIPS not in vars(module):
        return False
    parameters: Mapping[str, nn.Parameter] = dict(module.named_parameters())
    own = all(name in module._parameters for name in parameters)
    return own and bool(parameters) and all(each.shape[:1] == (count,) for each in parameters.values())


def _summand(data: Tensor, group: TensorGroup) -> DividedTensor:
    spec = spec_of(group, PARTIAL_SUM, data, shape=data.shape, strides=data.stride())
    return wrap(data, spec)


class _Gathered(torch.autograd.Function):
    """All of a tensor, as an ordinary one. Each rank makes a summand of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return whole(tensor).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summand(gradients[0].contiguous(), ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum of what the ranks have. All of its gradient comes to each of them."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, group: TensorGroup) -> Tensor:
        return _summand(data.detach().clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return whole(gradients[0]), None


class _Part(torch.autograd.Function):
    """This rank's part of a parameter, as an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, parameter: DividedTensor) -> Tensor:
        ctx.spec = parameter._spec
        return local_of(parameter).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        spec: Spec = ctx.spec
        part = gradients[0]
        own = spec_of(spec.group, spec.placement, part, shape=spec.shape, strides=spec.strides)
        return wrap(part, own)
