"""Runs a step function once on tensors without data, and writes down what it does (see `tracer`).

::

    copies of the batch ──► the step function, its calls seen by a `Tracer` ──► what was changed ──► a `Trace`
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import DeferredReadError
from shardwright.torch._private.modules import (
    num_hooks_registered,
    put_parametrization_cache,
    transforms_beside_hooks,
)
from shardwright.torch._private.tensors import fake_failures_unlogged
from shardwright.torch.batch.splitter import is_batch_tensor
from shardwright.torch.counting.compiled_modules import hooks_of
from shardwright.torch.counting.stand_in_data import LentTensors, OpenModules
from shardwright.torch.interception.compiled_code import nothing_compiled
from shardwright.torch.interception.coroutine import model_calls_marked
from shardwright.torch.interception.glue import GlueMode, set_active_handler
from shardwright.torch.interception.step_code import ReadingStep, TraceEnds, point_out, tracing
from shardwright.torch.interception.unit_attributes import refuse_replaced
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.python_state.attribute_use import AttributeUses
from shardwright.torch.python_state.left_behind import NothingLeftBehind
from shardwright.torch.pytorch.modules import hook_registries
from shardwright.torch.pytorch.tree import Slot, flatten
from shardwright.torch.randomness import get_state, python_random_kept, set_state
from shardwright.torch.script_collectives import over_replicas
from shardwright.torch.tracing.recording import Recording
from shardwright.torch.tracing.together import BufferWatch
from shardwright.torch.tracing.trace_data import SideEffects, Trace, TraceRequest
from shardwright.torch.tracing.tracer import Tracer


class _TraceRun:
    """One run of a step function, to be traced once."""

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
        was_there = self._nothing_left.was_there
        self._recording = recording = Recording(
            request,
            self._copies,
            self._buffers.tensors(),
            state=state,
            counters=counters,
            was_there=was_there,
        )
        self._tracer = tracer = Tracer(request, recording, self._buffers, was_there=was_there)
        pairs = zip(self._items, self._copies, strict=True)
        tracer.note_batch([copy for item, copy in pairs if is_batch_tensor(item)])
        self._use = AttributeUses(
            watched, lambda: recording.recorder.position, rehearses=lambda: recording.is_counting
        )
        self._open_modules = OpenModules(tracer)
        self._lent = LentTensors(request.unit_map, recording.values.lend, device=request.device)

    def trace(self) -> tuple[Trace, dict[str, bool], list[Slot]]:
        tracer, recording = self._tracer, self._recording
        tracer.before_step = self._look
        recording.hidden.on_use = lambda items: self._use.used(items, inside=True)
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
            recording.draws.put_back()
            set_active_handler(before)
            set_state(self._generators, self._request.device)

    def _trace(self) -> tuple[Trace, dict[str, bool], list[Slot]]:
        tracer, recording, unit_map = self._tracer, self._recording, self._request.unit_map
        is_value = recording.values.has
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
            refuse_replaced(unit_map.modules, is_value)
            recording.python_draws.look()
            changed = self._buffers.changed(is_value, under_another_name=recording.recorder.changes_memory_of)
            together = tracer.together()
            replaced = self._buffers.replaced(is_value)
            attributes = self._use.uses(unit_map.model, is_value)
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
        self._recording.python_draws.look()

    @property
    def _changes_batch(self) -> bool:
        pairs = zip(self._copies, self._versions, strict=True)
        return any(isinstance(copy, Tensor) and copy._version != version for copy, version in pairs)

    def _call_watched(self) -> tuple[Any, bool]:
        """Calls the step function; also whether it registers hooks."""
        recording = self._recording
        recording.draws.follow([*self._nothing_left.generators, *self._items])
        hooks_before = num_hooks_registered()
        try:
            with self._use.watching():
                result = self._call(*self._arguments)
        finally:
            recording.hidden.forget()
        registers_hooks = num_hooks_registered() > hooks_before + recording.num_hooks
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
        end = self._recording.end
        try:
            result = self._request.function(*args, **kwargs)
            end.step_returned()
        except TraceEnds:
            result = None
        if end.is_found:
            result = None
            set_active_handler(None)
            self._tracer.assume_loss()
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


@tracing()
def trace_step(
    unit_map: UnitMap,
    function: Callable[..., Any],
    arguments: Any = ((), {}),
    *,
    agree_on_end: Callable[[float], float] | None = None,
    **how: Any,
) -> Trace:
    """Traces one microbatch; for other options see `TraceRequest`."""
    request = TraceRequest(unit_map=unit_map, function=function, arguments=arguments, **how)
    if not isinstance(function, ReadingStep):
        quiet = _unprinted() if request.numbers is not None else nullcontext()
        with nothing_compiled(), fake_failures_unlogged(), quiet:
            return _traced(request)
    try:
        return _traced_up_to_its_end(request, function, agree_on_end)
    except DeferredReadError as error:
        if function.has_forward or not _reads_itself(unit_map.model, error):
            raise
        function.has_forward = True
        return _traced_up_to_its_end(request, function, agree_on_end)


def _traced_up_to_its_end(
    request: TraceRequest, function: ReadingStep, agree_on_end: Callable[[float], float] | None
) -> Trace:
    # print("loss", loss) has written the first word where the trace ends.
    with (
        nothing_compiled(),
        fake_failures_unlogged(),
        _unprinted(),
        model_calls_marked(request.unit_map.model, but_its_own=function.has_forward),
    ):
        trace = _traced(request)
        end = trace.end.wanted if agree_on_end is None else agree_on_end(trace.end.wanted)
        if end == trace.end.at:
            return trace
        earlier = _traced(replace(request, ends_at=end))
        # It may end at a change in place before the read.
        line = trace.end.line or earlier.end.line
        return replace(earlier, end=replace(earlier.end, line=line, read_at=trace.end.read_at))


def _reads_itself(model: nn.Module, error: DeferredReadError) -> bool:
    """Whether code of the model reads, and of none of its modules: a loss in the model's own forward."""
    inner = {id(module) for module in model.modules()} - {id(model)}
    return not any(id(module) in inner for module in error.inside)


@contextmanager
def _unprinted() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _traced(request: TraceRequest) -> Trace:
    trace, changed, attributes = _TraceRun(request).trace()
    if "" in request.unit_map.modules:
        attributes = []  # the model is one unit: no code between units uses them
    if not changed and not attributes:
        return trace
    if request.units_may_change:
        _refuse_to_count(request, changed, attributes)
    # What free operations alone write, such as a table for long sequences, every rank can write for itself.
    free = {name for name, from_units in changed.items() if not from_units}
    if free:
        trace = _TraceRun(request, state=changed.keys() - free, counters=free, watched=attributes).trace()[0]
        if trace.counters_in_one_place:
            return trace
    counters: set[str] = set()
    while True:
        try:
            kept = changed.keys() - counters
            return _TraceRun(request, state=kept, counters=counters, watched=attributes).trace()[0]
        except DeferredReadError as error:
            # Python looks at a counter: every rank counts for itself.
            found = {name for name in error.buffers - counters if not changed[name]}
            if not found:
                raise
            counters |= found


def _refuse_to_count(request: TraceRequest, changed: Mapping[str, bool], attributes: Sequence[Slot]) -> None:
    """Refuses a module that looks at a buffer which it changes, and has no part that a stage could have.

    Ranks could count with it, each for itself. But it may go another way in the next microbatch than in the
    trace, as a codebook does that takes its first values from the first batch. As a unit it can.
    """
    modules = dict(request.unit_map.model.named_modules())
    owners = {name: modules.get(name.rpartition(".")[0]) for name in changed}
    leaf_buffers = {name for name, owner in owners.items() if _is_leaf(owner, request.unit_map.model)}
    if not leaf_buffers:
        return
    try:
        _TraceRun(request, state=changed.keys(), watched=attributes).trace()
    except DeferredReadError as error:
        innermost = next(reversed(error.inside), None)
        if error.buffers & leaf_buffers and _is_leaf(innermost, request.unit_map.model):
            raise


def _is_leaf(module: object, model: nn.Module) -> bool:
    """Whether it is a part of the model without parameters in modules inside it."""
    return (
        isinstance(module, nn.Module)
        and module is not model
        and all(next(child.parameters(), None) is None for child in module.children())
    )
