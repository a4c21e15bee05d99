"""Chooses the units that a single-stage run recomputes or offloads, from its plan or settings.

A model without stages runs as it is, untraced. But a plan made for such a run, or a request to recompute or
offload everything, speaks of units, so the first batch is traced for them.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shardwright.plan import Plan
from shardwright.run.context import Context
from shardwright.torch.backward.activation_checkpointing import mark_recomputed, marked_inside
from shardwright.torch.batch.batch import Batch
from shardwright.torch.interception.glue import intercept_calls, restore_calls
from shardwright.torch.parameters.unit_map import UnitMap, refuse_unknown_units
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.units.model_traces import trace_parts

__all__ = ["keep_as_wished"]


def keep_as_wished(
    context: Context,
    module: nn.Module,
    function: Callable[..., Any],
    part: Batch,
) -> list[str]:
    """Marks the units to recompute; checks the plan first, if there is one.

    Args:
        context: the run, of one stage.
        module: the whole model.
        function: the step function.
        part: its arguments for one microbatch.

    Returns:
        The names of the units that offload what they keep.

    Raises:
        StalePlanError: the plan was made for another model.
        TraceError: there are units to be found, and the model cannot be traced.
    """
    config = context.config
    if context.plan is not None:
        names = list(dict.fromkeys(label.split("#")[0] for label in context.plan.model.units))
        refuse_unknown_units(module, names)
        _check(context.plan, context, UnitMap.of(module, names), function, part)
        stages = context.plan.stages
        _mark(module, names, {label.split("#")[0] for stage in stages for label in stage.recompute})
        return list(dict.fromkeys(label.split("#")[0] for stage in stages for label in stage.offload))
    if config.activation_checkpointing == "full" or config.offload_activations is True:
        trace = trace_parts(module, function, {1: part}, device=context.device, num_stages=2)[1]
        names = list(dict.fromkeys(label.split("#")[0] for label in trace.graph.labels))
        if config.activation_checkpointing == "full":
            _mark(module, names, names)
        if config.offload_activations is True:
            return names
    return []


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
