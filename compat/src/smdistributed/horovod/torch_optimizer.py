"""An optimizer of PyTorch that averages gradients over all ranks before it steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.run.context import is_initialized
from smdistributed.dataparallel.data_ranks import data_ranks


def averaging_optimizer(optimizer: Any, *, average: bool, in_half_precision: bool) -> Any:
    """An optimizer whose ``step`` takes the gradients of all ranks.

    Beside a run of `shardwright.torch` or ``smp.init`` it stays as it is: the library averages the gradients
    of its replicas itself.

    Args:
        average: take the mean of all ranks' gradients; else the sum.
    """
    if is_initialized():
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"DistributedOptimizer takes an optimizer, not a {type(optimizer).__name__}.")
    own = type(optimizer)
    if issubclass(own, _Averaging):
        raise UsageError("the optimizer is wrapped by DistributedOptimizer already. Wrap it once.")
    data_ranks()  # an error now, and not in the first step
    made: Any = optimizer
    # An attribute of the optimizer would hide the ``step`` of its new class. Schedulers set one.
    if "step" in vars(made) and not hasattr(made.step, "_wrapped_by_lr_sched"):
        raise UsageError(
            "the optimizer's step was replaced, so that it would not average gradients. Call "
            "hvd.DistributedOptimizer(optimizer) first, and replace the step of what it returns."
        )
    vars(made).pop("step", None)
    made.__class__ = type(own.__name__, (_Averaging, own), {})
    made._averages, made._in_half_precision = average, in_half_precision
    made._is_averaged = made._skips = False
    return made


class _Averaging(Optimizer):
    """What an optimizer becomes."""

    _averages: bool
    _in_half_precision: bool
    _is_averaged: bool
    _skips: bool

    def _over_ranks(self, tensors: list[Tensor]) -> list[Tensor]:
        ranks = data_ranks()
        return ranks.sums(tensors, divisor=ranks.size if self._averages else 1)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Makes of all gradients those of all ranks, before ``step`` does: to clip them, for example."""
        parameters = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        flags = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32)
        (used,) = data_ranks().sums([flags])
        # A rank that has not used a parameter counts with zeros.
        chosen = [each for each, count in zip(parameters, used.tolist(), strict=True) if count]
        mine = [_dense(each) for each in chosen]
        sent = [each.half() if self._in_half_precision else each for each in mine]
        for parameter, total in zip(chosen, self._over_ranks(sent), strict=True):
            parameter.grad = total.to(parameter.dtype)
        self._is_averaged = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """While it lasts, ``step`` takes gradients as they are: after `synchronize`."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages gradients, and updates the parameters.

        Args:
            closure: computes the loss and its gradients. The optimizer gets the loss over all ranks, so that
                one that decides by it, such as LBFGS, does the same on each.
        """
        self._opt_called = True  # schedulers look for it

        def over_ranks() -> Any:
            self._is_averaged = False
            loss = closure()  # type: ignore[misc]
            if not self._is_averaged:
                self.synchronize()
            return loss if loss is None else self._over_ranks([torch.as_tensor(loss).detach()])[0]

        result: Any
        if closure is not None:
            result = super().step(closure if self._skips else over_ranks)
        else:
            if not self._skips and not self._is_averaged:
                self.synchronize()
            result = super().step()
        self._is_averaged = False
        return result

    # Schedulers leave such a step as it is, and ``load_state_dict`` calls its hooks once.
    step._wrapped_by_lr_sched = step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forgets the gradients."""
        self._is_averaged = False
        super().zero_grad(*args, **kwargs)


def _dense(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
