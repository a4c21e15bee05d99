"""Refuses an optimizer whose updates need the parameters of all stages."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.comm.message_names import Purpose
from shardwright.run.context import Context, context, is_initialized
from shardwright.torch.model.distributed_model import wrapped_model
from shardwright.torch.optimizer.coupling import is_coupled, refuse_coupling

__all__ = ["UpdatesOverStages", "has_stages"]


def has_stages() -> bool:
    """Whether ranks of a replica have some parameters each."""
    return is_initialized() and context().mesh.pipeline > 1


class UpdatesOverStages:
    """Looks at the methods of an optimizer that may need all parameters."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._groups: list[Sequence[nn.Parameter]] = []
        self._is_harmless = False

    def note_new_groups(self) -> None:
        """Writes down the parameters of new groups, before this rank drops those of other ranks."""
        self._groups += [list(group["params"]) for group in self._optimizer.param_groups[len(self._groups) :]]

    def refuse_coupled_step(self) -> None:
        """Refuses an optimizer whose `step` needs all parameters, or cannot be tried; on all ranks alike."""
        current = context() if is_initialized() else None
        if self._is_harmless or current is None or current.links.replica is None or not has_stages():
            return
        model = wrapped_model()
        if model is None or not model.partitioned:
            return
        coupled = is_coupled(self._optimizer, groups=self._groups or None, if_unknown=True)
        if self._any_rank(coupled, current):
            refuse_coupling(self._optimizer)
        self._is_harmless = True

    def method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that may update, such as `first_step` of SAM."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_coupled(self._optimizer, name, groups=self._groups or None, arguments=(args, kwargs)):
                refuse_coupling(self._optimizer)
            return method(*args, **kwargs)

        return run

    def _any_rank(self, here: bool, current: Context) -> bool:
        assert current.links.replica is not None
        row = torch.tensor([float(here)], dtype=torch.float64, device=current.device)
        return bool(current.links.replica.gather(row, Purpose.UPDATE).any())
