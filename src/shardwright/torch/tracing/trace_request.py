"""A step function that is to be traced, and how."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.torch.counting.hook_effects import HookEffects
from shardwright.torch.interception.step_code import ReadingStep
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.python_state.watched_numbers import NumberReads
from shardwright.torch.tracing.calls.working_memory import WorkingMemory

__all__ = ["TraceRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A step function that is to be traced, and how: see `trace_step`.

    Attributes:
        unit_map: the units.
        function: the step function.
        arguments: its (args, kwargs).
        device: where the units compute.
        batch_size: samples in the microbatch.
        hooks: knows which hooks of modules change something.
        numbers: watches the numbers among the arguments.
        ends_at: see `EndFinder`.
        units_may_change: modules that raise `DeferredReadError` are kept whole, and another trace is tried.
        memory: cost class -> temporary memory; what is not there is counted and added. None: it is not
            counted.
        on_unit: called with each call of a unit.
    """

    unit_map: UnitMap
    function: Callable[..., Any]
    arguments: Any
    device: torch.device
    batch_size: int
    hooks: HookEffects
    numbers: NumberReads | None = None
    ends_at: float = math.inf
    units_may_change: bool = False
    memory: dict[str, WorkingMemory] | None = None
    on_unit: Callable[[], None] | None = None

    @property
    def may_read(self) -> bool:
        """Whether the step function's own code has a call that reads values."""
        return isinstance(self.function, ReadingStep) and self.function.may_read
