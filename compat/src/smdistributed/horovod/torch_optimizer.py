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

    def synchronize(self) -> None:
        """Makes of all gradients those of all ranks, before ``step`` does: to clip them, for example."""
        parameters = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        ranks = data_ranks()
        flags = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32)
        (used,) = ranks.sums([flags])
        # A rank that has not used a parameter counts with zeros.
        chosen = [each for each, count in zip(parameters, used.tolist(), strict=True) if count]
        mine = [_dense(each) for each in chosen]
        sent = [each.half() if self._in_half_precision else each for each in mine]
        totals = ranks.sums(sent, divisor=ranks.size if self._averages else 1)
        for parameter, total in zip(chosen, totals, strict=True):
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
        """Averages gradients, and updates the parameters."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self._skips and not self._is_averaged:
            self.synchronize()
        self._is_averaged = False
        super().step()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forgets the gradients."""
        self._is_averaged = False
        super().zero_grad(*args, **kwargs)


def _dense(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
