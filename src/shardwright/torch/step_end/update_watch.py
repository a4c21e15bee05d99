"""Warns of a loop that lacks ``optimizer.step()`` or ``zero_grad()``, or has them in the wrong place.

::

    zero_grad()          forgotten: the gradient is still there when the next step begins
    train_step(...)      the gradient of one parameter is seen
    optimizer.step()     forgotten: no update after some steps; or the gradient is zero when it comes
"""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.torch.tensor_parallel.divided_tensor import local_of

__all__ = ["UpdateWatch", "own_part_of"]

log = logging.getLogger(__name__)

_STEPS = 4
"""So many steps without an update are told: loops that sum gradients over a few batches make one by then."""

_UPDATES = 3
"""So many updates with gradients that stay, or that are gone, are told."""


class UpdateWatch:
    """Looks at one small parameter of this rank until its gradient came, was used and was cleared."""

    def __init__(self, *, warns: bool) -> None:
        self._watches = warns
        self._probe: Tensor | None = None
        self._before = torch.empty(0)  # the probe, when it was chosen
        self._steps = 0  # since it was chosen, or since an update
        self._updated = False  # with its gradient, which no step has found cleared since
        self._kept = 0  # further updates with a gradient that was not cleared
        self._gone = 0  # updates that found none
        self._others = ""  # an optimizer that has stepped, of none of the model's parameters

    def begin(self) -> None:
        """A training step begins."""
        if not self._watches or self._probe is None:
            return
        if self._updated and not _has_gradient(self._probe):
            self._watches = False  # it was used, and cleared: all is in its place
        elif self._steps == _STEPS:
            self._tell_no_update()

    def end(self, parameters: Iterable[Tensor], *, scaled: bool = False) -> None:
        """A training step has ended."""
        if not self._watches:
            return
        if self._probe is None:
            smallest_first = sorted((p for p in parameters if p.numel()), key=Tensor.numel)
            self._probe = next(filter(_has_gradient, smallest_first), None)
            if self._probe is not None:
                self._before = own_part_of(self._probe.detach()).clone()
        if self._probe is not None:
            self._steps += not scaled

    def note(self, optimizer: Optimizer) -> None:
        """An optimizer updates parameters of the model."""
        self._steps = 0
        if not self._watches or self._probe is None:
            return
        if not any(p is self._probe for group in optimizer.param_groups for p in group["params"]):
            return
        if not _has_gradient(self._probe):
            self._gone += 1
        else:
            # Another step function may have begun since, and have left this gradient as it was.
            self._kept += self._updated
            self._updated = True
        if self._gone == _UPDATES:
            self._warn(
                "%d updates found no gradients: zero_grad() is called between the step function and "
                "optimizer.step(). Call it before the step function.",
                _UPDATES,
            )
        elif self._kept == _UPDATES:
            self._warn(
                "gradients were not cleared after %d updates, so each update is by the sum of all so far. "
                "Call optimizer.zero_grad() in the loop, before the step function.",
                _UPDATES,
            )

    def note_other(self, optimizer: Optimizer) -> None:
        """An optimizer steps that has no parameter of the model."""
        self._others = type(optimizer).__name__

    def _tell_no_update(self) -> None:
        """Unless the script updates parameters by itself."""
        assert self._probe is not None
        if not torch.equal(own_part_of(self._probe.detach()), self._before):
            self._watches = False
        elif self._others:
            self._warn(
                "%s.step() is called, but that optimizer has no parameter of the wrapped model, which "
                "nothing has updated in %d steps. Make it from model.parameters() of the wrapped model.",
                self._others,
                _STEPS,
            )
        else:
            self._warn(
                "%d steps have made gradients, and nothing has updated the parameters. Call optimizer.step() "
                "after the step function. If you sum gradients over more batches, all is well; one batch of "
                "as many samples, with more microbatches, would need less memory.",
                _STEPS,
            )

    def _warn(self, text: str, *values: object) -> None:
        self._watches = False
        log.warning(text, *values)


def own_part_of(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that ranks share."""
    own = local_of(tensor)
    found: Tensor = getattr(own, "local", own)
    return found


def _has_gradient(parameter: Tensor) -> bool:
    """Whether the gradient is there and not zero."""
    gradient = parameter.grad
    return gradient is not None and gradient.layout is torch.strided and bool(own_part_of(gradient).any())
