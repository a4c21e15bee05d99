"""Protocols of the model, optimizers and reporter that a run holds.

The classes behind these roles depend on the run; the run knows only the methods that it calls.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from shardwright.observe import Observer, Phase, RunFolder
from shardwright.plan import Plan
from shardwright.torch.run.update_clock import UpdateClock

__all__ = ["Reports", "WrappedModel", "WrappedOptimizer"]


class WrappedModel(Protocol):
    """A model of the script, spread over ranks: see `DistributedModel`."""

    @property
    def partitioned(self) -> bool:
        """Whether ranks have taken their parts."""

    def get_module(self) -> nn.Module:
        """The script's own module."""


class WrappedOptimizer(Protocol):
    """An optimizer of the script, with the parameters of this rank: see `DistributedOptimizer`."""

    optimizer: Optimizer
    clock: UpdateClock
    scaler_wanted: Any

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its groups, of parameters of this rank."""

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses to optimize other parameters than these."""

    def keep(self, identifiers: set[int]) -> None:
        """Drops the parameters whose ids are not among these."""

    def match_names(self) -> None:
        """Loads a state that has waited for the names of parameters."""


class Reports(Protocol):
    """Reports to the observer: see `Reporter`."""

    num_steps: int
    calls_steps: bool

    @property
    def observer(self) -> Observer:
        """Writes it down."""

    @property
    def folder(self) -> RunFolder | None:
        """Of the run; None where nothing is written."""

    @property
    def draws_next_step(self) -> bool:
        """Whether the timeline of the next step will be asked for."""

    def phase(self, text: str) -> AbstractContextManager[Phase]:
        """Around a part of the first step that takes long."""

    def plan_made(self, plan: Plan) -> None:
        """The plan is in force; collective."""

    def close(self) -> None:
        """The run is over."""
