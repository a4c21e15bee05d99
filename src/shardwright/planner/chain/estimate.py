"""Estimates a profile without running anything, from each unit's work and a device's rates.

Seconds come from `costs.price`, which prices every way to train, plus an overhead per unit call. For units
that compute with trained parameters, the weight gradients are a part of the backward.
"""

from dataclasses import replace

from shardwright.cluster import Device
from shardwright.costs import calibration_of
from shardwright.costs.links import RankRates
from shardwright.model_graph import ModelGraph, Node
from shardwright.profile import Profile, UnitCost
from shardwright.work import Work

__all__ = ["MEASURED_ERROR", "error_of", "estimate_profile"]

MEASURED_ERROR, _ESTIMATED_ERROR = 0.15, 0.5
"""The worst of ``benchmarks/planner.py`` on one host, and what is common where units were not measured;
docs/benchmarks.md."""


def estimate_profile(graph: ModelGraph, *, device: Device) -> Profile:
    """Estimates the cost of every class of units and operations."""
    rates = _rates(device)
    costs: dict[str, UnitCost] = {}
    for node in graph.nodes:
        if not node.free and node.cost_class not in costs and (node.cost_class or node.kind == "unit"):
            costs[node.cost_class] = _cost(graph, node, rates, device.overhead_s)
    return Profile(costs=costs, device=device.name)


def error_of(provenance: str, device: Device) -> float:
    """The relative error of predictions from measured or estimated units of a device."""
    if provenance == "measured":
        return MEASURED_ERROR
    known = calibration_of(device.family).error if device.family else None
    return _ESTIMATED_ERROR if known is None else known


def _rates(device: Device) -> RankRates:
    """A device's rates are those that are reached; its family tells what attention and kernels take."""
    finer = calibration_of(device.family).efficiencies
    reached = replace(finer, matmul=device.reached, matmul_factor=1.0, memory=1.0)
    return RankRates(peak=device.flops_per_s, memory=device.memory_Bps, reached=reached)


def _cost(graph: ModelGraph, node: Node, rates: RankRates, overhead_s: float) -> UnitCost:
    inputs = [graph.values[value].spec for value in node.inputs]
    outputs = [graph.values[value].spec for value in node.outputs]
    own = graph.units[node.name].parameters if node.kind == "unit" else ()
    held = [graph.parameters[name] for name in dict.fromkeys((*own, *node.parameters))]
    input_bytes = sum(spec.num_bytes for spec in inputs)
    around = input_bytes + sum(spec.num_bytes for spec in (*outputs, *(p.spec for p in held)))
    work = Work(product_flops=node.flops, moved_bytes=around) if node.work is None else node.work
    price = rates.price(work)
    call_s = overhead_s * (node.kind == "unit")
    has_backward = any(spec.requires_grad for spec in outputs)
    trained = any(parameter.spec.requires_grad and not parameter.is_buffer for parameter in held)
    return UnitCost(
        forward_s=price.forward + call_s,
        backward_s=price.backward + 2 * call_s if has_backward else 0.0,
        weight_s=price.weight if has_backward and trained and node.flops and node.kind == "unit" else 0.0,
        saved_bytes=node.saved_bytes,
        work_bytes=node.work_bytes,
        weight_bytes=node.weight_bytes,
        split_work_bytes=node.split_work_bytes,
        input_bytes=input_bytes,
        flops=node.flops,
        provenance="estimated",
    )
