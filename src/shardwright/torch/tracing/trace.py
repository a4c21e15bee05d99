"""Runs a step function once on tensors without data, and writes down what it does (see `tracer`)."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import DeferredReadError
from shardwright.torch._private import (
    fake_failures_unlogged,
    num_hooks_registered,
    put_parametrization_cache,
    transforms_beside_hooks,
)
from shardwright.torch.batch.batch import is_batch_tensor
from shardwright.torch.counting.hook_effects import HookEffects, hooks_of
from shardwright.torch.counting.trace_guard import OpenModules, Unchanged
from shardwright.torch.interception.attribute_inputs import refuse_replaced
from shardwright.torch.interception.compiled_code import nothing_compiled
from shardwright.torch.interception.glue import GlueMode, set_active_handler
from shardwright.torch.interception.model_calls import model_calls_marked
from shardwright.torch.interception.own_errors import point_out
from shardwright.torch.interception.step_code import ReadingStep, TraceEnds
from shardwright.torch.interception.trace_marker import tracing
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

__all__ = ["trace_step"]


@tracing()
def trace_step(
    unit_map: UnitMap,
    function: Callable[..., Any],
    arguments: Any = ((), {}),
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 1,
    count_memory: bool = False,
    agree_on_end: Callable[[float], float] | None = None,
    numbers: NumberReads | None = None,
    hooks: HookEffects | None = None,
    units_may_change: bool = False,
) -> Trace:
    """Traces one microbatch.

    Args:
        unit_map: the units, whose calls must be intercepted (`glue.intercept_calls`).
        function: the step function.
        arguments: its (args, kwargs).
        device: where the units compute.
        batch_size: samples in the microbatch.
        count_memory: find out what units need for a moment; takes three more forwards on fake tensors for
            each cost class.
        agree_on_end: for a `ReadingStep`: gives the first place of all ranks at which a trace ends, to be
            called by all of them; None for what this rank alone finds.
        numbers: watches those among the arguments.
        hooks: knows which hooks of modules change something.
        units_may_change: the caller keeps modules whole that raise `DeferredReadError`, and tries again.

    Raises:
        DeferredReadError: Python code reads a value that only one rank will have; the line is named.
        TraceError: the loss does not depend on the model.
        NumberMatters: a number that is watched is wanted itself.
    """
    hooks = HookEffects() if hooks is None else hooks
    run = _Run(
        unit_map,
        function,
        arguments,
        torch.device(device),
        batch_size,
        count_memory,
        hooks,
        numbers,
        units_may_change=units_may_change,
    )
    if not isinstance(function, ReadingStep):
        with (
            nothing_compiled(),
            fake_failures_unlogged(),
            _unprinted() if numbers is not None else nullcontext(),
        ):
            return _traced(run)
    try:
        return _traced_up_to_its_end(run, function, agree_on_end)
    except DeferredReadError as error:
        if function.has_forward or not _reads_itself(unit_map.model, error):
            raise
        function.has_forward = True
        return _traced_up_to_its_end(run, function, agree_on_end)


def _traced_up_to_its_end(
    run: "_Run", function: ReadingStep, agree_on_end: Callable[[float], float] | None
) -> Trace:
    """Traces a step that may read values."""
    # print("loss", loss) has written the first word where the trace ends.
    with (
        nothing_compiled(),
        fake_failures_unlogged(),
        _unprinted(),
        model_calls_marked(run.unit_map.model, but_its_own=function.has_forward),
    ):
        trace = _traced(run)
        end = trace.wanted_end if agree_on_end is None else agree_on_end(trace.wanted_end)
        if end == trace.end:
            return trace
        earlier = _traced(replace(run, ends_at=end))
        # It may end at a change in place before the read.
        return replace(earlier, end_line=trace.end_line or earlier.end_line, read_at=trace.read_at)


def _reads_itself(model: nn.Module, error: DeferredReadError) -> bool:
    """Whether code of the model reads, and of none of its modules: a loss in the model's own forward."""
    inner = {id(module) for module in model.modules()} - {id(model)}
    return not any(id(module) in inner for module in error.inside)


@contextmanager
def _unprinted() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _traced(run: "_Run") -> Trace:
    trace, changed, attributes = run.trace()
    if "" in run.unit_map.modules:
        attributes = []  # the model is one unit: no code between units uses them
    if not changed and not attributes:
        return trace
    if run.units_may_change:
        _refuse_to_count(run, changed, attributes)
    # What free operations alone write, such as a table for long sequences, every rank can write for itself.
    free = {name for name, from_units in changed.items() if not from_units}
    if free:
        trace = run.trace(state=changed.keys() - free, counters=free, watched=attributes)[0]
        if trace.counters_in_one_place:
            return trace
    counters: set[str] = set()
    while True:
        try:
            return run.trace(state=changed.keys() - counters, counters=counters, watched=attributes)[0]
        except DeferredReadError as error:
            # Python looks at a counter: every rank counts for itself.
            found = {name for name in error.buffers - counters if not changed[name]}
            if not found:
                raise
            counters |= found


def _refuse_to_count(run: "_Run", changed: Mapping[str, bool], attributes: Sequence[Slot]) -> None:
    """Refuses a module that looks at a buffer which it changes, and has no part that a stage could have.

    Ranks could count with it, each for itself. But it may go another way in the next microbatch than in the
    trace, as a codebook does that takes its first values from the first batch. As a unit it can.

    Raises:
        DeferredReadError: there is one.
    """
    modules = dict(run.unit_map.model.named_modules())
    owners = {name: modules.get(name.rpartition(".")[0]) for name in changed}
    leaf_buffers = {name for name, owner in owners.items() if _is_leaf(owner, run.unit_map.model)}
    if not leaf_buffers:
        return
    try:
        run.trace(state=changed.keys(), watched=attributes)
    except DeferredReadError as error:
        if error.buffers & leaf_buffers and _is_leaf(next(reversed(error.inside), None), run.unit_map.model):
            raise


def _is_leaf(module: object, model: nn.Module) -> bool:
    """Whether it is a part of the model without parameters in modules inside it."""
    return (
        isinstance(module, nn.Module)
        and module is not model
        and all(next(child.parameters(), None) is None for child in module.children())
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A step function and its arguments; each call of `trace` runs it once."""

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

    def trace(
        self,
        state: Collection[str] = frozenset(),
        counters: Collection[str] = frozenset(),
        watched: Sequence[Slot] = (),
    ) -> tuple[Trace, dict[str, bool], list[Slot]]:
        """Traces; also tells which buffers outside of units were changed (`BufferWatch.changed`), and which
        attributes of modules were changed or written.

        Args:
            state: buffers whose content is a value of the graph.
            counters: changed buffers that every rank keeps.
            watched: changed attributes, whose use is of interest.
        """
        items, structure = flatten(self.arguments)
        # On copies: a step function that changes its batch in place must find it unchanged when it runs.
        copies = [_copy(item) if is_batch_tensor(item) else item for item in items]
        if self.numbers is not None:
            copies = self.numbers.watched(copies, structure)
        versions = [item._version if isinstance(item, Tensor) else 0 for item in copies]
        watch = BufferWatch(self.unit_map)
        generators = get_state(self.device)
        objects = [item for item in items if not is_batch_tensor(item)]
        nothing_left = NothingLeftBehind(self.unit_map.model, self.function, objects=objects)
        nor_by_hooks = NothingLeftBehind(nn.Module(), *hooks_of(self.unit_map.model))
        tracer = self._tracer(copies, watch, nothing_left.was_there, state=state, counters=counters)
        tracer.note_batch([c for item, c in zip(items, copies, strict=True) if is_batch_tensor(item)])
        use = AttributeUses(watched, lambda: tracer.position, rehearses=lambda: tracer.samples.counts)

        held = HeldContent(self.unit_map.model)

        def look() -> None:
            use.look()
            held.look()
            tracer.python_draws.look()

        tracer.before_step = look
        tracer.after_unit = lambda: use.look(inside=True)
        args, kwargs = structure.rebuild(copies)
        before = set_active_handler(tracer)
        open_modules = OpenModules(tracer)
        unchanged = Unchanged(self.unit_map, tracer.lend, device=self.device)
        try:
            glue = GlueMode(tracer, tracer.asked)
            with (
                transforms_beside_hooks(),
                python_random_kept(),
                nor_by_hooks,
                nothing_left,
                unchanged,
                open_modules,
                glue,
            ):
                tracer.draws.follow([*nothing_left.generators, *items])
                hooks_before = num_hooks_registered()
                with use.watching(), tracer.watching():
                    result = self._call(tracer, args, kwargs)
                registers_hooks = num_hooks_registered() > hooks_before + tracer.samples.num_hooks
                set_active_handler(None)
                refuse_replaced(self.unit_map.modules, tracer.is_value)
                tracer.python_draws.look()
                changed = watch.changed(tracer.is_value, under_another_name=tracer.changes_memory_of)
                together = tracer.together()
                replaced = watch.replaced(tracer.is_value)
                attributes = use.uses(self.unit_map.model, tracer.is_value)
                changed_inside = held.changed
            changes_batch = any(
                isinstance(c, Tensor) and c._version != v for c, v in zip(copies, versions, strict=True)
            )
            trace = tracer.finish(
                result,
                self.batch_size,
                together=together,
                changes_batch=changes_batch,
                temporary_hooks=registers_hooks and not unchanged.left_hooks,
                attributes=attributes,
                left_in_units=tuple(unchanged.left_in_units),
                left=nothing_left.stand_ins,
            )
            trace.replaced_buffers = {n: how for n, how in replaced.items() if how or n not in trace.state}
            touched = {
                (id(m), key): (m, key)
                for m, key in (*unchanged.changed, *use.written(self.unit_map.model), *changed_inside)
            }
            return trace, changed, list(touched.values())
        except DeferredReadError as error:
            error.inside = open_modules.at_failure
            raise
        except Exception as error:
            point_out(error, self.unit_map.model)
            raise
        finally:
            # A circle of references would keep the copies of the batch.
            del tracer.before_step, tracer.after_unit
            tracer.draws.put_back()
            set_active_handler(before)
            set_state(generators, self.device)

    def _tracer(
        self,
        batch: Sequence[Any],
        watch: BufferWatch,
        was_there: Callable[[Tensor], bool],
        *,
        state: Collection[str],
        counters: Collection[str],
    ) -> Tracer:
        return Tracer(
            self.unit_map,
            self.device,
            batch,
            watch,
            state=state,
            counters=counters,
            was_there=was_there,
            count_memory=self.count_memory,
            hooks=self.hooks,
            ends_at=self.ends_at,
            may_read=isinstance(self.function, ReadingStep) and self.function.may_read,
        )

    def _call(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the step function; None where its program ends before it returns."""
        cached = put_parametrization_cache(None)
        try:
            with over_replicas(sends=False):
                return self._called(tracer, args, kwargs)
        finally:
            put_parametrization_cache(cached)

    def _called(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = self.function(*args, **kwargs)
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
