"""Runs a model once on fake tensors and counts what each module does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwright.torch.batch import Arguments
from shardwright.torch.cost import CostCounter
from shardwright.torch.glue import intercept_calls, restore_calls
from shardwright.torch.trace import trace_step
from shardwright.torch.unit_map import UnitMap
from shardwright.torch.units import ModuleCost

__all__ = ["discover"]


def discover(
    model: nn.Module, function: Callable[..., Any], arguments: Arguments, *, device: torch.device
) -> dict[int, ModuleCost]:
    """Costs of every module in one microbatch, by id of the module.

    Args:
        model: the whole model.
        function: the step function.
        arguments: (args, kwargs) of one microbatch.
        device: where the model computes.
    """
    costs: dict[int, ModuleCost] = {}
    open_calls: list[int] = []

    def enter(module: nn.Module, args: Any) -> None:
        cost = costs.setdefault(id(module), ModuleCost())
        cost.calls += 1
        open_calls.append(CostCounter.running_flops())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        costs[id(module)].flops += CostCounter.running_flops() - open_calls.pop()

    handles = []
    intercept_calls(model)
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
        trace_step(UnitMap.of(model, [""]), function, arguments, device=device)
    finally:
        for handle in handles:
            handle.remove()
        restore_calls(model)
    return costs
