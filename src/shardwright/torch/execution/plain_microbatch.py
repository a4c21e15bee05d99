"""A microbatch on a rank that holds the whole model, and what that rank keeps and recomputes.

A model without stages runs as it is, untraced. But a plan made for such a run, or a request to recompute or
offload everything, speaks of units, so the first batch is traced for them.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.plan import Plan
from shardwright.run.context import Context
from shardwright.runtime.action_loop import note_begin
from shardwright.schedule import Kind
from shardwright.torch.backward.activation_checkpointing import mark_recomputed, marked_inside
from shardwright.torch.backward.loss_reduction import Shadows
from shardwright.torch.batch.batch import Batch
from shardwright.torch.interception.backward_calls import (
    refuse_second_backward,
    refuse_several_numbers,
    refuse_untrained,
)
from shardwright.torch.interception.glue import (
    call_without_hooks,
    intercept_calls,
    restore_calls,
    set_active_handler,
)
from shardwright.torch.offload.stage_offload import StageOffload
from shardwright.torch.parameters.unit_map import UnitMap, refuse_unknown_units
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.replicas.reducer import GradientReducer
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.units.model_traces import trace_parts


class Kept(NamedTuple):
    """Names of the units, where they are called by themselves, and of those that offload what they keep."""

    units: list[str]
    offloaded: list[str]


def keep_as_wished(
    context: Context,
    module: nn.Module,
    function: Callable[..., Any],
    part: Batch,
) -> Kept:
    """Marks the units to recompute; checks the plan first, if there is one."""
    config = context.config
    if context.plan is not None:
        names = list(dict.fromkeys(label.split("#")[0] for label in context.plan.model.units))
        refuse_unknown_units(module, names)
        _check(context.plan, context, UnitMap.of(module, names), function, part)
        stages = context.plan.stages
        _mark(module, names, {label.split("#")[0] for stage in stages for label in stage.recompute})
        return Kept(names, list(dict.fromkeys(label.split("#")[0] for s in stages for label in s.offload)))
    if (
        config.activation_checkpointing == "full"
        or config.offload_activations is True
        or config.compile == "on"
    ):
        trace = trace_parts(module, function, {1: part}, device=context.device, num_stages=2)[1]
        names = list(dict.fromkeys(label.split("#")[0] for label in trace.graph.labels))
        if config.activation_checkpointing == "full":
            _mark(module, names, names)
        return Kept(names, names if config.offload_activations is True else [])
    return Kept([], [])


def _check(
    plan: Plan, context: Context, unit_map: UnitMap, function: Callable[..., Any], part: Batch
) -> None:
    for unit in unit_map.modules.values():
        intercept_calls(unit)
    try:
        trace = trace_step(unit_map, function, part.arguments, device=context.device)
    finally:
        for unit in unit_map.modules.values():
            restore_calls(unit)
    plan.check(trace.graph, world_size=context.mesh.world_size)


def _mark(module: nn.Module, names: Iterable[str], recomputed: Iterable[str]) -> None:
    units = {id(unit): unit for unit in map(module.get_submodule, names)}
    inside = marked_inside(module, set(units))  # a module around them cannot recompute itself as well
    for unit in [*map(module.get_submodule, recomputed), *(units[each] for each in inside)]:
        mark_recomputed(unit)


class PlainMicrobatch:
    """The handler of a step function that is run as it is, for one microbatch.

    Attributes:
        loss: what ``backward`` was called with; None as long as it was not.
        waited_s: seconds for which copies were waited for, before and in it.
        memory: bytes in use at these moments; empty where nobody asked.
    """

    def __init__(
        self,
        factor: Callable[..., float],
        reducer: GradientReducer | None,
        *,
        first: bool,
        last: bool,
        in_use: Callable[[], int] | None = None,
        look: Callable[[Tensor], None] | None = None,
        offload: StageOffload | None = None,
        offloaded: frozenset[nn.Module] = frozenset(),
        shadows: Shadows | None = None,
    ):
        self._shadows = shadows
        self._offload = offload
        self._offloaded = offloaded
        self._factor = factor
        self._look_at_loss = look
        self._opens = reducer if first else None
        self._reducer = reducer
        self._is_last = last
        self.loss: Tensor | None = None
        self.backward_s = (0.0, 0.0)
        self.waited_s = (0.0, 0.0)
        self.memory: list[int] = []
        self._in_use = in_use

    is_trace = True  # there may be none

    @property
    def intercepts(self) -> bool:
        """Units are called one by one where they offload what they keep: compiled, but not what is around."""
        return self._offload is not None

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a torch function: nothing is intercepted on a single rank."""
        return func(*args, **kwargs)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit; units are intercepted on a single rank where they offload what they keep."""
        before = set_active_handler(None)
        try:
            if self._offload is None or module not in self._offloaded:
                return call_without_hooks(module, *args, **kwargs)
            with self._offload.keeping(module):
                return call_without_hooks(module, *args, **kwargs)
        finally:
            set_active_handler(before)

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Runs autograd, with the loss scaled by how much the microbatch counts."""
        refuse_second_backward(self.loss is not None)
        refuse_untrained(loss.requires_grad)
        refuse_several_numbers(loss, gradient)
        self.loss = loss.detach()
        if self._look_at_loss is not None:
            self._look_at_loss(loss)
        note_begin(Kind.BACKWARD)
        begin_s = self._moment()
        factor = self._factor(loss)
        if self._opens is not None:
            self._opens.begin()
        if self._reducer is not None:
            self._reducer.on_backward(0, begins=True, last=self._is_last)
        with nullcontext() if self._offload is None else self._brought_back(self._offload):
            if factor != 0:  # nothing in it counts: it may be NaN
                start = torch.ones_like(loss) if gradient is None else gradient
                torch.autograd.backward(loss, start * factor)
        if self._reducer is not None:
            self._reducer.on_backward(0, begins=False, last=self._is_last)
        self.backward_s = (begin_s, self._moment())

    @contextmanager
    def _brought_back(self, offload: StageOffload) -> Iterator[None]:
        """Surrounds the backward: what was offloaded comes back ahead of its use."""
        offload.offload()
        waited_s = offload.waited_s
        offload.load()
        yield
        self.waited_s = waited_s, offload.waited_s - waited_s
        offload.end()

    def model_begins(self) -> None:
        """Does nothing: the whole model is here."""

    def model_returned(self, result: Any) -> None:
        """Every value is here; an evaluation may be followed from it."""
        if self._shadows is not None:
            self._shadows.begin(leaves(result))

    def _moment(self) -> float:
        """The present time; records the memory in use."""
        now_s = time.perf_counter()
        if self._in_use is not None:
            self.memory.append(self._in_use())
        return now_s
