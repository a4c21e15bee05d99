"""What a rank checks of a program, and which changes of a model it refuses.

Other stages would continue with the unchanged tensor (see `shardwright.runtime.dataflow`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import TraceError, TraceMismatchError
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.trace_data import Trace


def refusing_changes(
    call: Callable[..., Any], unit: nn.Module, allowed: frozenset[int], *, line: str, microbatch: int
) -> Callable[..., Any]:
    """Has a call of a unit raise where it changes other arguments than those allowed."""

    def refusal() -> TraceMismatchError:
        return TraceMismatchError(
            f"{line}: {name_of_call(unit)} changes an argument in place in microbatch {microbatch}, but not "
            "in the trace, so other stages would go on with the tensor as it was. Change a copy inside the "
            "module (x = x.clone()), or choose by torch.where, and return it."
        )

    def watched(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            (item, item._version)
            for position, item in enumerate(flatten((args, kwargs))[0])
            if isinstance(item, Tensor) and position not in allowed and not item.is_inference()
        ]
        try:
            result = call(*args, **kwargs)
        except RuntimeError as error:
            # Autograd refuses it by itself for a tensor of another stage, which is a leaf here.
            if torch.is_grad_enabled() and "leaf Variable that requires grad" in str(error):
                raise refusal() from error
            raise
        if any(item._version != version for item, version in tensors):
            raise refusal()
        return result

    return watched


def check_trace(
    trace: Trace, homes: Sequence[int], home_of: Sequence[int], stage_ranks: Sequence[int]
) -> None:
    """Refuses a step function that stages would compute otherwise than one process."""
    _check_after_backward(trace, homes, home_of)
    if len(stage_ranks) > 1:
        _check_lasting_tensors(trace)
        _check_replaced_buffers(trace)
    _check_counters(trace, homes, stage_ranks)
    _check_attributes(trace, homes, stage_ranks)
    _check_python_draws(trace, homes, stage_ranks)
    _check_generators(trace)


def _check_after_backward(trace: Trace, homes: Sequence[int], home_of: Sequence[int]) -> None:
    """Refuses a tensor that is made after the backward on one stage and needed on another."""
    if trace.backward_at is None:
        return
    late = {step.node for step in trace.steps[trace.backward_at :] if step.node is not None}
    for step in trace.steps[trace.backward_at :]:
        if step.node is None:
            continue
        for _, value in step.reads:
            if trace.graph.values[value].producer in late and home_of[value] != homes[step.node]:
                raise TraceError(
                    f"{step.line}: a tensor made after backward() is needed on another stage. "
                    "Call backward() after everything that the step function computes."
                )


def _check_lasting_tensors(trace: Trace) -> None:
    """Refuses a tensor that outlives the step function, and that only one rank would change."""
    for step in trace.steps:
        if any(change.lasting for change in step.changes):
            raise TraceError(
                f"{step.line}: what comes from a module is written into a tensor that was there before the "
                "step function was called, and only the rank of that module would have the change. Register "
                "the tensor as a buffer of the model (register_buffer), or return what is written from the "
                "step function and write it afterwards."
            )


def _check_replaced_buffers(trace: Trace) -> None:
    """Refuses another tensor in the place of a buffer, where other ranks have no room for its content."""
    for name, how in trace.effects.replaced_buffers.items():
        shapes = f", which changes its shape from {how}" if how else ""
        remedy = f"write into it: self.{name.rpartition('.')[2]}.copy_(...)"
        raise TraceError(
            f"the step function puts a tensor that comes from modules in the place of the buffer {name}"
            f"{shapes}, and only the rank of these modules would have it. Move this code and the buffer into "
            f"the forward of the module that computes the tensor, which is then one unit; or {remedy}, with "
            "the shape that it has from the start."
        )


def _check_counters(trace: Trace, homes: Sequence[int], stage_ranks: Sequence[int]) -> None:
    """Refuses a counter that Python reads, if other microbatches could come in between."""
    for name in dict.fromkeys(name for step in trace.steps for name in step.counters):
        used = [index for index, step in enumerate(trace.steps) if name in step.counters]
        before = [homes[s.node] for s in trace.steps[: used[0]] if s.node is not None]
        between = {homes[s.node] for s in trace.steps[used[0] : used[-1]] if s.node is not None}
        for rank in set(stage_ranks):
            # A microbatch begins with the first stage of the rank, and is left where another one comes up.
            reached = max([stage_ranks.index(rank), *(home for home in before if stage_ranks[home] == rank)])
            paused = trace.backward_at is not None and used[0] < trace.backward_at <= used[-1]
            if paused or any(home != reached for home in between if stage_ranks[home] == rank):
                raise TraceError(
                    f"the buffer {name} is changed in the step function, Python reads its value, and stages "
                    "change in between, where other microbatches come in. Read and change it in one place."
                )


def _check_attributes(trace: Trace, homes: Sequence[int], stage_ranks: Sequence[int]) -> None:
    """Refuses an attribute in which a microbatch would not find what the one before leaves there."""
    for use in trace.effects.attributes:
        read, write = use.first_read, use.last_write
        if read is None or use.put_back:
            continue
        if use.in_place:
            write = use.accesses[-1]  # to all microbatches it is the same tensor, wherever they look at it
        reads = "is read" if isinstance(use.module, nn.Module) else "is read, or changed as if it were,"
        where = f"the attribute {use.name} {reads} at {read.line} before the microbatch writes it"
        if use.carries_tensor:
            raise TraceError(
                f"{where}, at {write.line}: a tensor goes from one microbatch to the next, and other stages "
                "do not have it. Keep it as a buffer (register_buffer), or write the attribute first: a new "
                "list at the start of forward, where it is one."
            )
        for rank in set(stage_ranks):
            pauses = pauses_of(trace, homes, stage_ranks, rank)
            if any(read.before <= pause < write.before for pause in pauses):
                raise TraceError(
                    f"{where}, at {write.line}, and stages change in between, where other microbatches come "
                    "in. Read and change it in one place, or write it before it is read."
                )


def _check_python_draws(trace: Trace, homes: Sequence[int], stage_ranks: Sequence[int]) -> None:
    """Refuses draws of Python and NumPy that ranks would not make in the same order."""
    places = {
        (rank, sum(pause < place for pause in pauses_of(trace, homes, stage_ranks, rank)))
        for rank in set(stage_ranks)
        for place in trace.random.python_at
    }
    if trace.random.python_at and (trace.random.python_in_units or len(places) > len(set(stage_ranks))):
        where = "also inside modules" if trace.random.python_in_units else "at several places"
        raise TraceError(
            f"the step function draws random numbers of Python or NumPy between modules, and {where}: ranks "
            "would not draw them in the same order. Draw them before the step function and pass them to it, "
            "or use PyTorch's random functions, which are the same on all ranks."
        )


def _check_generators(trace: Trace) -> None:
    """Refuses random numbers after a seed between units, where not every rank draws all of them in a row."""
    if trace.random.set_at:
        raise TraceError(
            f"{trace.random.set_at}: the step function, or a module without putting it back, has set the "
            "state of a generator of random numbers (torch.manual_seed, torch.set_rng_state, "
            "torch.random.fork_rng, or a method of the generator). Each stage runs a part of what draws from "
            "it, so they would draw other numbers than a single process. Draw with a generator that is made "
            "there (torch.randn(..., generator=torch.Generator().manual_seed(seed))), or set the state in "
            "one module, within torch.random.fork_rng()."
        )


def pauses_of(trace: Trace, homes: Sequence[int], stage_ranks: Sequence[int], rank: int) -> list[int]:
    """Positions of the steps before which a rank leaves a microbatch for others."""
    stage = list(stage_ranks).index(rank)
    pauses = [] if trace.backward_at is None else [trace.backward_at]
    for index, step in enumerate(trace.steps):
        if step.node is not None and stage_ranks[homes[step.node]] == rank and homes[step.node] != stage:
            stage = homes[step.node]
            pauses.append(index)
    return pauses
