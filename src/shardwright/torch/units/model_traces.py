"""Chooses the units of a model and traces it, once for each microbatch size."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.config import Config
from shardwright.errors import DeferredReadError, TraceError
from shardwright.torch.backward.activation_checkpointing import is_marked
from shardwright.torch.batch.batch import Batch
from shardwright.torch.counting.compiled_modules import calls_compiled, compile_units
from shardwright.torch.counting.hook_effects import HookEffects, hooks_of
from shardwright.torch.interception.glue import intercept_calls, restore_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.module_hooks import has_backward_hooks
from shardwright.torch.tracing.calls.working_memory import WorkingMemory
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.units.module_costs import discover
from shardwright.torch.units.unit_choice import ModuleCost, choose_units

__all__ = ["most_stages", "trace_parts"]

log = logging.getLogger(__name__)


def most_stages(config: Config, *, pipeline: int, divides: bool) -> int:
    """The stages that a plan may have, which says how fine units need to be."""
    return pipeline * (config.virtual_stages or (1 if divides and pipeline == 1 else 2))


def trace_parts(
    model: nn.Module,
    function: Callable[..., Any],
    parts: Mapping[int, Batch],
    *,
    device: torch.device,
    num_stages: int,
    divides: bool = False,
    units: Sequence[str] | None = None,
    prepare: Callable[[UnitMap], None] | None = None,
    memory: dict[str, WorkingMemory] | None = None,
    agree_on_end: Callable[[float], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, Trace]:
    """Traces every microbatch size with the same units; modules that cannot be split are kept whole."""
    hooks = HookEffects()
    count = None if progress is None else _Count(progress, total=len(list(model.modules())))
    trace = partial(
        trace_step,
        function=function,
        device=device,
        memory=memory,
        agree_on_end=agree_on_end,
        hooks=hooks,
        units_may_change=True,
        on_unit=count,
    )
    if units is not None and not hooks_of(model):  # what hooks do shows in the run that finds the units
        with suppress(TraceError):
            return _traces(UnitMap.of(model, units), parts, trace, prepare)
    arguments = next(iter(parts.values())).arguments
    costs = discover(model, function, arguments, device=device, hooks=hooks, on_module=count)
    forced: set[int] = set()
    preferred = _better_whole(model, costs)
    while True:
        names = choose_units(
            model,
            costs,
            num_stages=num_stages,
            forced=frozenset(forced),
            preferred=preferred,
            divides=divides,
            device=device.type,
        )
        if count is not None:
            count.more(len(names) * len(parts))
        try:
            return _traces(UnitMap.of(model, names), parts, trace, prepare)
        except DeferredReadError as error:
            whole = _smallest_around(error, model, forced)
            if whole is None:
                raise
            log.warning("%s is not split, because its code reads values: %s", type(whole).__name__, error)
            forced.add(id(whole))


class _Count:
    """Counts calls of modules, and tells how many there were."""

    def __init__(self, progress: Callable[[int, int], None], *, total: int):
        self._progress = progress
        self._done, self._total = 0, total

    def more(self, number: int) -> None:
        """So many calls are to come; what was to come before is done."""
        self._done = self._total
        self._total += number

    def __call__(self) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)


def _traces(
    unit_map: UnitMap,
    parts: Mapping[int, Batch],
    trace: Callable[..., Trace],
    prepare: Callable[[UnitMap], None] | None,
) -> dict[int, Trace]:
    """Traces every microbatch size with these units."""
    if prepare is not None:
        prepare(unit_map)
    compile_units(unit_map.model, list(unit_map.modules))
    for module in unit_map.modules.values():
        intercept_calls(module)
    try:
        traces: dict[int, Trace] = {}
        for m, part in parts.items():
            with _left_out(m, part) if traces else nullcontext():
                traces[m] = trace(unit_map, arguments=part.arguments, batch_size=part.num_samples or 1)
        return traces
    finally:
        for module in unit_map.modules.values():
            restore_calls(module)


def _better_whole(model: nn.Module, costs: Mapping[str, ModuleCost]) -> frozenset[int]:
    """Ids of the modules that are kept whole where they fit into a stage."""
    return frozenset(
        id(module)
        for name, module in model.named_modules()
        if is_marked(module)
        or _recomputes_itself(module)
        or (name in costs and costs[name].recomputed)
        or has_backward_hooks(module)
        or calls_compiled(module)
    )


@contextmanager
def _left_out(m: int, part: Batch) -> Iterator[None]:
    """Does without a number of microbatches that the model cannot be called with, as others will do.

    A batch norm over channels, for example, refuses a single sample.
    """
    try:
        yield
    except DeferredReadError:
        raise
    except Exception as error:
        log.info("%d microbatches of %s samples are not considered: %s", m, part.num_samples, error)


def _recomputes_itself(module: nn.Module) -> bool:
    """Whether it is a layer of transformers that recomputes itself in training, unlike in evaluation."""
    is_layer = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
    return is_layer and bool(getattr(module, "gradient_checkpointing", False))


def _smallest_around(error: DeferredReadError, model: nn.Module, forced: set[int]) -> nn.Module | None:
    """The smallest module around a failure that can be a unit."""
    inner = {id(module) for module in model.modules()} - {id(model)} - forced
    for module in reversed(error.inside):
        if id(module) in inner:
            assert isinstance(module, nn.Module)
            return module
    return None
