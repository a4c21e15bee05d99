"""Runs a model once on fake tensors and counts what each module does."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.torch.batch import Arguments
from shardwright.torch.cost import CostCounter, Counts
from shardwright.torch.entanglement import Entanglement
from shardwright.torch.glue import intercept_calls, restore_calls
from shardwright.torch.source_line import frames_up_to
from shardwright.torch.trace import trace_step
from shardwright.torch.unit_map import UnitMap
from shardwright.torch.units import ModuleCost

__all__ = ["discover"]

log = logging.getLogger(__name__)


def discover(
    model: nn.Module, function: Callable[..., Any], arguments: Arguments, *, device: torch.device
) -> dict[str, ModuleCost]:
    """Costs of every module in one microbatch, by name of the module.

    Args:
        model: the whole model.
        function: the step function.
        arguments: (args, kwargs) of one microbatch.
        device: where the model computes.
    """
    costs: dict[str, ModuleCost] = {}
    open_calls: list[tuple[Counts, Counts]] = []  # at the beginning; what modules inside have done
    open_names: list[str] = []
    entanglement = Entanglement()

    def enter(name: str, module: nn.Module, args: Any) -> None:
        cost = costs.setdefault(name, ModuleCost())
        cost.calls += 1
        if not any(costs[outer].recomputed for outer in open_names):
            between = frames_up_to("torch.utils.checkpoint")
            if between is not None:
                # Code of the module around it in between: that module recomputes itself, not this one.
                own_code = any(not n.startswith(("torch.", "shardwright.", "functools")) for n in between)
                around = open_names[-1] if open_names and own_code else ""
                costs[around or name].recomputed = True
        entanglement.enter(name, module)
        open_names.append(name)
        open_calls.append((CostCounter.so_far(), Counts()))

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        open_names.pop()
        entanglement.leave()
        before, inside = open_calls.pop()
        done = CostCounter.so_far() - before
        if open_calls:
            outer, children = open_calls[-1]
            open_calls[-1] = outer, children + done
        own = done - inside
        costs[name].flops += done.flops
        costs[name].chooses_at_random |= own.draws > 0 and own.reads > 0

    handles = []
    intercept_calls(model)
    try:
        # Hooks know names, not identities: a model that fake tensors cannot get through is traced as a copy.
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, name)))
            handles.append(module.register_forward_hook(partial(leave, name)))
        with entanglement.watching():
            trace_step(UnitMap.of(model, [""]), function, arguments, device=device)
    finally:
        for handle in handles:
            handle.remove()
        restore_calls(model)
    for name in entanglement.whole:
        while name and name not in costs:  # a container is not called
            name = name.rpartition(".")[0]
        if not name:
            log.warning(
                "The forward of the model itself keeps tensors in attributes of modules inside it, or calls "
                "them from an autograd.Function. Microbatches may disturb each other there. Move this code "
                "into a module of its own, which is then not split."
            )
        elif not costs[name].whole:
            costs[name].whole = True
            log.info("%s is not split: its own code reaches into the modules inside it", name)
    return costs
