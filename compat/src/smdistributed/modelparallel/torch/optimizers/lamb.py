"""LAMB: Adam whose step is scaled, tensor by tensor, to the size of the tensor.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020; with the
gradients scaled to a norm beforehand, as NVIDIA's implementation does. With p a tensor, g its gradient, t
the step::

    g = g / max(1, |all gradients| / max_grad_norm)
    m = b1 m + (1 - b1) g                     v = b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p
    p = p - lr |p| / |u| u
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.torch.model.distributed_model import wrapped_model
from shardwright.torch.optimizer.clipping import gradient_norm
from smdistributed.modelparallel.torch.optimizers.fused import FusedOptimizer


class FusedLAMB(FusedOptimizer):
    """LAMB.

    Args:
        betas: of the average of gradients, and of that of their squares.
        adam_w_mode: decay the parameter itself; else add it to the gradient.
        grad_averaging: weigh gradients in the average by ``1 - beta``; else by 1.
        max_grad_norm: norm to which all gradients are scaled, over all stages; None for as they are.
    """

    sums_over_stages = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ):
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, amsgrad=amsgrad, set_grad_none=set_grad_none)
        self._decays_parameter = adam_w_mode
        self._scales_all = use_nvlamb

    def _scale(self) -> Tensor | None:
        most = self.defaults["max_grad_norm"]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return _scale(parameters, most) if most else None

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        decay, step = group["weight_decay"], group["step"]
        if decay and not self._decays_parameter:
            gradient = gradient + decay * parameter
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        average.mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrects = group["bias_correction"]
        first, second = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
        update = (average / first) / ((squares / second).sqrt() + group["eps"])
        if decay and self._decays_parameter:
            update = update + decay * parameter
        if decay or self._scales_all:
            update = update * _trust_ratio(parameter, update)
        parameter.sub_(update * group["lr"])


def _scale(parameters: list[Tensor], most: float) -> Tensor:
    """What gradients are multiplied by, so that their norm is at most `most`."""
    if _are_of_the_model(parameters):
        norm = gradient_norm(parameters)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return torch.where(norm > most, most / norm, torch.ones_like(norm))


def _are_of_the_model(parameters: list[Tensor]) -> bool:
    """Whether they are of the wrapped model, of which other ranks have others; here there may be none."""
    model = wrapped_model()
    if model is None or not model.partitioned:
        return False
    own = model.local_parameter_ids()
    return not parameters or any(id(parameter) in own for parameter in parameters)


def _trust_ratio(parameter: Tensor, update: Tensor) -> Tensor:
    size, change = parameter.norm(), update.norm()
    return torch.where((size > 0) & (change > 0), size / change, torch.ones_like(size))
