"""Runs a step function once on tensors without data, and writes down what it does (see `tracer`)."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.errors import DeferredReadError
from shardwright.torch._private import fake_failures_unlogged
from shardwright.torch.counting.hook_effects import HookEffects
from shardwright.torch.interception.compiled_code import nothing_compiled
from shardwright.torch.interception.coroutine import model_calls_marked
from shardwright.torch.interception.step_code import ReadingStep, tracing
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.python_state.watched_numbers import NumberReads
from shardwright.torch.pytorch.tree import Slot
from shardwright.torch.tracing.calls.working_memory import WorkingMemory
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.tracing.trace_request import TraceRequest
from shardwright.torch.tracing.trace_run import TraceRun

__all__ = ["trace_step"]


@tracing()
def trace_step(
    unit_map: UnitMap,
    function: Callable[..., Any],
    arguments: Any = ((), {}),
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 1,
    memory: dict[str, WorkingMemory] | None = None,
    agree_on_end: Callable[[float], float] | None = None,
    numbers: NumberReads | None = None,
    hooks: HookEffects | None = None,
    units_may_change: bool = False,
    on_unit: Callable[[], None] | None = None,
) -> Trace:
    """Traces one microbatch.

    Args:
        unit_map: the units, whose calls must be intercepted (`glue.intercept_calls`).
        function: the step function.
        arguments: its (args, kwargs).
        device: where the units compute.
        batch_size: samples in the microbatch.
        memory: cost class -> what calls need for a moment; what is not there is counted, by one or two more
            forwards and backwards, and added. None: that is not found out.
        agree_on_end: for a `ReadingStep`, gives the first place at which a trace of any rank ends; all call
            it. None for what this rank alone finds.
        numbers: watches those among the arguments.
        hooks: knows which hooks of modules change something.
        units_may_change: the caller keeps modules whole that raise `DeferredReadError`, and tries again.
        on_unit: called with each call of a unit.

    Raises:
        DeferredReadError: Python code reads a value that only one rank will have; the line is named.
        TraceError: the loss does not depend on the model.
        NumberMatters: a number that is watched is wanted itself.
    """
    request = TraceRequest(
        unit_map=unit_map,
        function=function,
        arguments=arguments,
        device=torch.device(device),
        batch_size=batch_size,
        memory=memory,
        hooks=HookEffects() if hooks is None else hooks,
        numbers=numbers,
        units_may_change=units_may_change,
        on_unit=on_unit,
    )
    if not isinstance(function, ReadingStep):
        quiet = _unprinted() if numbers is not None else nullcontext()
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
    """Traces a step that may read values."""
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
    trace, changed, attributes = TraceRun(request).trace()
    if "" in request.unit_map.modules:
        attributes = []  # the model is one unit: no code between units uses them
    if not changed and not attributes:
        return trace
    if request.units_may_change:
        _refuse_to_count(request, changed, attributes)
    # What free operations alone write, such as a table for long sequences, every rank can write for itself.
    free = {name for name, from_units in changed.items() if not from_units}
    if free:
        trace = TraceRun(request, state=changed.keys() - free, counters=free, watched=attributes).trace()[0]
        if trace.counters_in_one_place:
            return trace
    counters: set[str] = set()
    while True:
        try:
            kept = changed.keys() - counters
            return TraceRun(request, state=kept, counters=counters, watched=attributes).trace()[0]
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

    Raises:
        DeferredReadError: there is one.
    """
    modules = dict(request.unit_map.model.named_modules())
    owners = {name: modules.get(name.rpartition(".")[0]) for name in changed}
    leaf_buffers = {name for name, owner in owners.items() if _is_leaf(owner, request.unit_map.model)}
    if not leaf_buffers:
        return
    try:
        TraceRun(request, state=changed.keys(), watched=attributes).trace()
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
