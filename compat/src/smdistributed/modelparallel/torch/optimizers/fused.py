"""What optimizers named after fused kernels have in common."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError


class FusedOptimizer(torch.optim.Optimizer):
    """Updates one parameter after another, and counts the steps of each group."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, amsgrad: bool, set_grad_none: bool):
        if amsgrad:
            raise UsageError(f"{type(self).__name__} has no AMSGrad variant. Set amsgrad to False.")
        super().__init__(params, defaults)
        self._leaves_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients."""
        super().zero_grad(self._leaves_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters; collective over the ranks of the replica."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._scale()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    raise UsageError(
                        f"{type(self).__name__} does not take sparse gradients. Use torch.optim.SparseAdam "
                        "for them."
                    )
                scaled = gradient if scale is None else gradient * scale.to(gradient.dtype)
                self._update(parameter, scaled, group)
        return loss

    def _scale(self) -> Tensor | None:
        """What gradients are multiplied by, before any is used; None for nothing."""
        return None

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError
