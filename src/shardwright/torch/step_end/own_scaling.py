"""Warns where code of the script scales gradients by a number that ranks have different: its own clipping.

A norm over all ``p.grad`` that are there is that of one rank's stages, or rows::

    train_step(...)      the largest entry of some gradients of this rank is noted
    p.grad.mul_(factor)  by the script
    optimizer.step()     all have the same factor: it goes with the row of the next step's end, to all ranks
"""

import logging
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwright.torch.tensor_parallel.divided_tensor import local_of

__all__ = ["OwnScaling"]

log = logging.getLogger(__name__)

_UPDATES = 3
_LOOKED_AT = 16  # gradients of a rank
_TOLERANCE = 0.02  # float16 rounds by less


class OwnScaling:
    """Looks at gradients before and behind what a script does to them, for the first updates.

    Attributes:
        factor: of all this rank's gradients before the last update; 0 where that is no one number.
    """

    def __init__(self, *, num_ranks: int, warns: bool) -> None:
        self._warns = warns
        self._left = _UPDATES if num_ranks > 1 else 0
        self._noted: list[tuple[Tensor, int, float]] = []
        self.factor = 0.0

    def end(self, parameters: Iterable[Tensor]) -> None:
        """A training step has ended; before anything is done to its gradients."""
        if not self._left:
            return
        self._noted = []
        for parameter in parameters:
            gradient = _gradient(parameter)
            if gradient is not None and len(self._noted) < _LOOKED_AT:
                place = int(gradient.abs().argmax())
                self._noted.append((parameter, place, float(gradient[place])))

    def note(self) -> None:
        """An optimizer updates parameters of the model."""
        if not self._noted:
            return
        factors = []
        for parameter, place, before in self._noted:
            gradient = _gradient(parameter)
            if gradient is not None and before:
                factors.append(float(gradient[place]) / before)
        alike = len(factors) > 1 and all(math.isclose(f, factors[0], rel_tol=_TOLERANCE) for f in factors)
        self.factor = factors[0] if alike and math.isfinite(factors[0]) else 0.0
        self._noted = []

    def look(self, factors: Sequence[float]) -> None:
        """Takes the factors of all ranks."""
        if not self._left or not any(factors):
            return
        self._left -= 1
        self.factor = 0.0
        known = {rank: factor for rank, factor in enumerate(factors) if factor}
        least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        if not math.isclose(known[least], known[most], rel_tol=_TOLERANCE):
            self._left = 0
            if not self._warns:
                return
            log.warning(
                "between the step function and the update, rank %d multiplied its gradients by %.3g, and "
                "rank %d by %.3g. If that is clipping, it takes the norm of one rank's gradients for that of "
                "the model. That of all ranks: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).",
                *(least, known[least], most, known[most]),
            )


def _gradient(parameter: Tensor) -> Tensor | None:
    """What this rank has of a gradient, as one row; None where that is nothing that can be looked at."""
    gradient = parameter.grad
    if gradient is None or gradient.is_meta or gradient.layout is not torch.strided:
        return None
    own = local_of(gradient)
    own = getattr(own, "local", own).detach()
    own = (torch.view_as_real(own.resolve_conj()) if own.is_complex() else own).flatten()
    return own if own.numel() and own.isfinite().all() else None
