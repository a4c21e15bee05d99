"""Makes the plan of a run from its first batch: finds units, traces, measures, and asks the planner."""

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwright.plan import MeshPlan, Plan, SchedulePlan, StagePlan, identity
from shardwright.torch.batch import Arguments, Splitter
from shardwright.torch.context import Context
from shardwright.torch.discover import discover
from shardwright.torch.glue import intercept_calls, restore_calls
from shardwright.torch.trace import UnitMap, trace_step
from shardwright.torch.units import choose_units

__all__ = ["Planner"]


class Planner:
    """Plans a run when its first batch is there."""

    def __init__(self, context: Context, model: nn.Module):
        self._context = context
        self._model = model

    def __call__(self, function: Callable[..., Any], arguments: Arguments, splitter: Splitter) -> Plan:
        context = self._context
        m = context.config.microbatches or 2 * context.mesh.pipeline
        part = splitter.split(arguments, m)[0]
        costs = discover(self._model, function, part, device=context.device)
        kind = "1f1b" if context.config.pipeline == "auto" else context.config.pipeline
        v = context.config.virtual_stages or (2 if kind in ("zb_v", "interleaved_1f1b") else 1)
        num_stages = context.mesh.pipeline * v
        names = choose_units(self._model, costs, num_stages=num_stages)
        unit_map = UnitMap.of(self._model, names)
        for module in unit_map.modules.values():
            intercept_calls(module)
        trace = trace_step(unit_map, function, part, device=context.device)
        graph = trace.graph
        total = sum(graph.nodes[c].flops + 1 for c in graph.calls)
        stages: list[list[str]] = [[] for _ in range(num_stages)]
        done = 0
        for c in graph.calls:
            stages[min(num_stages - 1, int((done + graph.nodes[c].flops / 2) * num_stages / total))].append(graph.nodes[c].label)
            done += graph.nodes[c].flops + 1
        from shardwright.schedule import place_stages
        ranks = place_stages(kind, num_ranks=context.mesh.pipeline, stages_per_rank=v)
        return Plan(
            model=identity(graph),
            mesh=MeshPlan(pipeline=context.mesh.pipeline, data=context.mesh.data, placement_strategy=context.mesh.placement),
            schedule=SchedulePlan(kind=kind, microbatches=m),
            stages=tuple(StagePlan(rank=r, units=tuple(u)) for r, u in zip(ranks, stages)),
        )
