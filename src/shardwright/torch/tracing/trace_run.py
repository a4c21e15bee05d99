"""Runs a step function once under a tracer, with everything watched that it may change.

::

    copies of the batch ──► the step function, its calls seen by a `Tracer` ──► what was changed ──► a `Trace`
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import DeferredReadError
from shardwright.torch._private import (
    num_hooks_registered,
    put_parametrization_cache,
    transforms_beside_hooks,
)
from shardwright.torch.batch.batch import is_batch_tensor
from shardwright.torch.counting.hook_effects import HookEffects, hooks_of
from shardwright.torch.counting.trace_guard import OpenModules, Unchanged
from shardwright.torch.interception.attribute_inputs import refuse_replaced
from shardwright.torch.interception.glue import GlueMode, set_active_handler
from shardwright.torch.interception.own_errors import point_out
from shardwright.torch.interception.step_code import ReadingStep, TraceEnds
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.python_state.attribute_use import AttributeUses
from shardwright.torch.python_state.left_behind import NothingLeftBehind
from shardwright.torch.python_state.reachable import HeldContent
from shardwright.torch.python_state.snapshot import Slot
from shardwright.torch.python_state.watched_numbers import NumberReads
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.randomness.python_random import python_random_kept
from shardwright.torch.randomness.rng import get_state, set_state
from shardwright.torch.script_collectives.replica_collectives import over_replicas
from shardwright.torch.tracing.glue_buffers import BufferWatch
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.tracing.tracer import Tracer

__all__ = ["TraceRun", "TracedStep"]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step function that is to be traced, and how: see `trace_step`."""

    unit_map: UnitMap
    function: Callable[..., Any]
    arguments: Any
    device: torch.device
    batch_size: int
    count_memory: bool
    hooks: HookEffects
    numbers: NumberReads | None = None
    ends_at: float = math.inf
    units_may_change: bool = False


class TraceRun:
    """One run of a step function, to be traced once.

    Args:
        step: the step function, and how it is traced.
        state: buffers whose content is a value of the graph.
        counters: changed buffers that every rank keeps.
        watched: changed attributes, whose use is of interest.
    """

    def __init__(
        self,
        step: TracedStep,
        *,
        state: Collection[str] = frozenset(),
        counters: Collection[str] = frozenset(),
        watched: Sequence[Slot] = (),
    ):
        self._step = step
        model = step.unit_map.model
        self._items, structure = flatten(step.arguments)
        # On copies: a step function that changes its batch in place must find it unchanged when it runs.
        copies = [_copy(item) if is_batch_tensor(item) else item for item in self._items]
        self._copies = copies if step.numbers is None else step.numbers.watched(copies, structure)
        self._arguments = structure.rebuild(self._copies)
        self._versions = [item._version if isinstance(item, Tensor) else 0 for item in self._copies]
        self._buffers = BufferWatch(step.unit_map)
        self._generators = get_state(step.device)  # before the tracer follows what is drawn
        objects = [item for item in self._items if not is_batch_tensor(item)]
        self._nothing_left = NothingLeftBehind(model, step.function, objects=objects)
        self._nor_by_hooks = NothingLeftBehind(nn.Module(), *hooks_of(model))
        self._tracer = tracer = Tracer(
            step.unit_map,
            step.device,
            self._copies,
            self._buffers,
            state=state,
            counters=counters,
            was_there=self._nothing_left.was_there,
            count_memory=step.count_memory,
            hooks=step.hooks,
            ends_at=step.ends_at,
            may_read=isinstance(step.function, ReadingStep) and step.function.may_read,
        )
        pairs = zip(self._items, self._copies, strict=True)
        tracer.note_batch([copy for item, copy in pairs if is_batch_tensor(item)])
        self._use = AttributeUses(watched, lambda: tracer.position, rehearses=lambda: tracer.samples.counts)
        self._held = HeldContent(model)
        self._open_modules = OpenModules(tracer)
        self._unchanged = Unchanged(step.unit_map, tracer.lend, device=step.device)

    def trace(self) -> tuple[Trace, dict[str, bool], list[Slot]]:
        """Traces the step function.

        Returns:
            The trace; the buffers outside of units that were changed (`BufferWatch.changed`); the attributes
            of modules that were changed or written.
        """
        tracer = self._tracer
        tracer.before_step = self._look
        tracer.after_unit = lambda: self._use.look(inside=True)
        before = set_active_handler(tracer)
        try:
            return self._trace()
        except DeferredReadError as error:
            error.inside = self._open_modules.at_failure
            raise
        except Exception as error:
            point_out(error, self._step.unit_map.model)
            raise
        finally:
            # A circle of references would keep the copies of the batch.
            del tracer.before_step, tracer.after_unit
            tracer.draws.put_back()
            set_active_handler(before)
            set_state(self._generators, self._step.device)

    def _trace(self) -> tuple[Trace, dict[str, bool], list[Slot]]:
        tracer, unit_map = self._tracer, self._step.unit_map
        with (
            transforms_beside_hooks(),
            python_random_kept(),
            self._nor_by_hooks,
            self._nothing_left,
            self._unchanged,
            self._open_modules,
            GlueMode(tracer, tracer.asked),
        ):
            result, registers_hooks = self._call_watched()
            # What was changed shows before it is put back.
            refuse_replaced(unit_map.modules, tracer.is_value)
            tracer.python_draws.look()
            changed = self._buffers.changed(tracer.is_value, under_another_name=tracer.changes_memory_of)
            together = tracer.together()
            replaced = self._buffers.replaced(tracer.is_value)
            attributes = self._use.uses(unit_map.model, tracer.is_value)
            changed_inside = self._held.changed
        trace = tracer.finish(
            result,
            self._step.batch_size,
            together=together,
            changes_batch=self._changes_batch,
            temporary_hooks=registers_hooks and not self._unchanged.left_hooks,
            attributes=attributes,
            left_in_units=tuple(self._unchanged.left_in_units),
            left=self._nothing_left.stand_ins,
        )
        trace.replaced_buffers = {n: how for n, how in replaced.items() if how or n not in trace.state}
        written = self._use.written(unit_map.model)
        touched = {(id(m), key): (m, key) for m, key in (*self._unchanged.changed, *written, *changed_inside)}
        return trace, changed, list(touched.values())

    def _look(self) -> None:
        """Before every step of the trace."""
        self._use.look()
        self._held.look()
        self._tracer.python_draws.look()

    @property
    def _changes_batch(self) -> bool:
        pairs = zip(self._copies, self._versions, strict=True)
        return any(isinstance(copy, Tensor) and copy._version != version for copy, version in pairs)

    def _call_watched(self) -> tuple[Any, bool]:
        """Calls the step function; also whether it registers hooks."""
        tracer = self._tracer
        tracer.draws.follow([*self._nothing_left.generators, *self._items])
        hooks_before = num_hooks_registered()
        with self._use.watching(), tracer.watching():
            result = self._call(*self._arguments)
        registers_hooks = num_hooks_registered() > hooks_before + tracer.samples.num_hooks
        set_active_handler(None)
        return result, registers_hooks

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the step function; None where its program ends before it returns."""
        cached = put_parametrization_cache(None)
        try:
            with over_replicas(sends=False):
                return self._called(args, kwargs)
        finally:
            put_parametrization_cache(cached)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer = self._tracer
        try:
            result = self._step.function(*args, **kwargs)
            tracer.end.step_returned()
        except TraceEnds:
            result = None
        if tracer.end.is_found:
            result = None
            set_active_handler(None)
            tracer.assume_loss()
        return result


def _copy(tensor: Tensor) -> Tensor:
    """A tensor of its own, which is no leaf of autograd: those cannot be changed in place."""
    copy = tensor.detach().clone()
    if not tensor.requires_grad:
        return copy
    with torch.enable_grad():
        return copy.requires_grad_().clone()
