"""Runs a step function once under a tracer, with everything watched that it may change.

::

    copies of the batch ──► the step function, its calls seen by a `Tracer` ──► what was changed ──► a `Trace`
"""

from collections.abc import Collection, Iterator, Sequence
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
from shardwright.torch.counting.hook_effects import hooks_of
from shardwright.torch.counting.stand_in_data import LentTensors, OpenModules
from shardwright.torch.interception.glue import GlueMode, set_active_handler
from shardwright.torch.interception.step_code import TraceEnds, point_out
from shardwright.torch.interception.unit_attributes import refuse_replaced
from shardwright.torch.python_state.attribute_use import AttributeUses
from shardwright.torch.python_state.left_behind import NothingLeftBehind
from shardwright.torch.pytorch.modules import hook_registries
from shardwright.torch.pytorch.tree import Slot, flatten
from shardwright.torch.randomness import get_state, python_random_kept, set_state
from shardwright.torch.script_collectives import over_replicas
from shardwright.torch.tracing.glue_buffers import BufferWatch
from shardwright.torch.tracing.trace_data import SideEffects, Trace
from shardwright.torch.tracing.trace_request import TraceRequest
from shardwright.torch.tracing.tracer import Tracer

__all__ = ["TraceRun"]


class TraceRun:
    """One run of a step function, to be traced once.

    Args:
        request: the step function, and how it is traced.
        state: buffers whose content is a value of the graph.
        counters: changed buffers that every rank keeps.
        watched: changed attributes, whose use is of interest.
    """

    def __init__(
        self,
        request: TraceRequest,
        *,
        state: Collection[str] = frozenset(),
        counters: Collection[str] = frozenset(),
        watched: Sequence[Slot] = (),
    ):
        self._request = request
        model = request.unit_map.model
        self._items, structure = flatten(request.arguments)
        # On copies: a step function that changes its batch in place must find it unchanged when it runs.
        copies = [_copy(item) if is_batch_tensor(item) else item for item in self._items]
        self._copies = copies if request.numbers is None else request.numbers.watched(copies, structure)
        self._arguments = structure.rebuild(self._copies)
        self._versions = [item._version if isinstance(item, Tensor) else 0 for item in self._copies]
        self._buffers = BufferWatch(request.unit_map)
        self._generators = get_state(request.device)  # before the tracer follows what is drawn
        objects = [item for item in self._items if not is_batch_tensor(item)]
        self._nothing_left = NothingLeftBehind(model, request.function, *hooks_of(model), objects=objects)
        self._tracer = tracer = Tracer(
            request,
            self._copies,
            self._buffers,
            state=state,
            counters=counters,
            was_there=self._nothing_left.was_there,
        )
        pairs = zip(self._items, self._copies, strict=True)
        tracer.note_batch([copy for item, copy in pairs if is_batch_tensor(item)])
        self._use = AttributeUses(watched, lambda: tracer.position, rehearses=lambda: tracer.samples.counts)
        self._open_modules = OpenModules(tracer)
        self._lent = LentTensors(request.unit_map, tracer.lend, device=request.device)

    def trace(self) -> tuple[Trace, dict[str, bool], list[Slot]]:
        """Traces the step function.

        Returns:
            The trace; the buffers outside of units that were changed (`BufferWatch.changed`); the attributes
            of modules that were changed or written.
        """
        tracer = self._tracer
        tracer.before_step = self._look
        tracer.watch_uses(lambda items: self._use.used(items, inside=True))
        tracer.after_unit = lambda: self._use.look(inside=True)
        before = set_active_handler(tracer)
        try:
            return self._trace()
        except DeferredReadError as error:
            error.inside = self._open_modules.at_failure
            raise
        except Exception as error:
            point_out(error, self._request.unit_map.model)
            raise
        finally:
            # A circle of references would keep the copies of the batch.
            del tracer.before_step, tracer.after_unit
            tracer.draws.put_back()
            set_active_handler(before)
            set_state(self._generators, self._request.device)

    def _trace(self) -> tuple[Trace, dict[str, bool], list[Slot]]:
        tracer, unit_map = self._tracer, self._request.unit_map
        with (
            transforms_beside_hooks(),
            python_random_kept(),
            self._nothing_left,
            self._lent,
            self._open_modules,
            GlueMode(tracer, tracer.asked),
        ):
            hooks = set(_hooks_in(unit_map.model))
            result, registers_hooks = self._call_watched()
            # What was changed shows before it is put back.
            refuse_replaced(unit_map.modules, tracer.is_value)
            tracer.python_draws.look()
            changed = self._buffers.changed(tracer.is_value, under_another_name=tracer.changes_memory_of)
            together = tracer.together()
            replaced = self._buffers.replaced(tracer.is_value)
            attributes = self._use.uses(unit_map.model, tracer.is_value)
            touched = self._nothing_left.changed
            leaves_hooks = not hooks.issuperset(_hooks_in(unit_map.model))
        in_units = {id(sub) for unit in unit_map.modules.values() for sub in unit.modules()}
        trace = tracer.finish(
            result,
            together=together,
            effects=SideEffects(
                changes_batch=self._changes_batch,
                temporary_hooks=registers_hooks and not leaves_hooks,
                attributes=attributes,
                left_in_units=tuple((holder, key) for holder, key in touched if id(holder) in in_units),
                replaced_buffers=replaced,
            ),
            left=self._nothing_left.stand_ins,
        )
        slots = {(id(slot[0]), slot[1]): slot for slot in (*touched, *self._use.written(unit_map.model))}
        return trace, changed, list(slots.values())

    def _look(self, items: Sequence[Any]) -> None:
        """Looks for changes before every step of the trace, which is given these."""
        self._use.look()
        self._use.used(items)
        self._nothing_left.of_model.look()
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
            result = self._request.function(*args, **kwargs)
            tracer.end.step_returned()
        except TraceEnds:
            result = None
        if tracer.end.is_found:
            result = None
            set_active_handler(None)
            tracer.assume_loss()
        return result


def _hooks_in(model: nn.Module) -> Iterator[tuple[int, int]]:
    for module in model.modules():
        for registry in hook_registries(module):
            yield from ((id(registry), number) for number in registry)


def _copy(tensor: Tensor) -> Tensor:
    """A tensor of its own, which is no leaf of autograd: those cannot be changed in place."""
    copy = tensor.detach().clone()
    if not tensor.requires_grad:
        return copy
    with torch.enable_grad():
        return copy.requires_grad_().clone()
