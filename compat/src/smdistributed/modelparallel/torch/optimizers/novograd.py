"""NovoGrad: momentum of gradients that are divided, tensor by tensor, by their averaged norm.

Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019. With p a tensor, g its
gradient, and v = |g|^2 at first::

    v = b2 v + (1 - b2) |g|^2
    m = b1 m + (g / (sqrt(v) + eps) + weight_decay p)        reg_inside_moment
    p = p - lr m

As in NVIDIA's implementation, gradients may be averaged, averages corrected for their beginning at zero, and
the decay may stand outside of the average, which is the default.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.optimizers.fused import FusedOptimizer


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad.

    Args:
        betas: of the average of gradients, and of that of their norms.
        reg_inside_moment: average the decay with the gradients; else add it to the update.
        grad_averaging: weigh gradients in the average by ``1 - beta``; else by 1.
        init_zero: the average of norms begins at zero; else at the first norm.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ):
        if norm_type not in (0, 2, float("inf")):
            raise UsageError(f"norm_type is {norm_type!r}, but it is 2, or 0 for the largest entry.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, amsgrad=amsgrad, set_grad_none=set_grad_none)
        self._decays_inside = reg_inside_moment

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), step, decay = group["betas"], group["step"], group["weight_decay"]
        corrects = group["bias_correction"]
        first, second = (1 - beta1**step, (1 - beta2**step) ** 0.5) if corrects else (1.0, 1.0)
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        state["norm"] = norm = _averaged_norm(state.get("norm"), gradient, beta2, group)
        divisor = norm / second + group["eps"]
        weight = 1 - beta1 if group["grad_averaging"] else 1.0
        average = state["exp_avg"]
        if self._decays_inside:
            average.mul_(beta1).add_(gradient / divisor + decay * parameter, alpha=weight)
            update = average / first
        else:
            average.mul_(beta1).add_(gradient, alpha=weight)
            update = average / first / divisor + decay * parameter
        parameter.sub_(update * group["lr"])


def _averaged_norm(before: Tensor | None, gradient: Tensor, beta: float, group: dict[str, Any]) -> Tensor:
    """The average of the norms of the gradients of a tensor, up to now."""
    is_euclidean = group["norm_type"] == 2
    norm = gradient.norm() if is_euclidean else gradient.abs().max()
    if before is None:
        if not group["init_zero"]:
            return norm
        before = torch.zeros_like(norm)
    if is_euclidean:
        return (beta * before.square() + (1 - beta) * norm.square()).sqrt()
    return beta * before + (1 - beta) * norm
