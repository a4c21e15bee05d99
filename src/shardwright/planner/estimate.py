"""A profile without running anything: from FLOPs, bytes and the rates of a device.

The forward of a unit takes ``overhead + flops / rate + bytes / bandwidth``: an additive roofline, smooth
where one limit takes over from the other. Bytes are those of its inputs, outputs and parameters. The
backward takes twice as long; of units that compute (matrix products with parameters), half of it is the
gradient of the weights.
"""

from shardwright.cluster import Device
from shardwright.model_graph import ModelGraph, Node
from shardwright.profile import Profile, UnitCost

__all__ = ["estimate_profile"]

# Large matrix products rarely reach the peak rate of a data sheet.
_EFFICIENCY = 0.7


def estimate_profile(graph: ModelGraph, *, device: Device) -> Profile:
    """Estimates the cost of every class of units.

    Args:
        graph: the traced model, with FLOPs and saved bytes.
        device: peak rates.
    """
    costs: dict[str, UnitCost] = {}
    for call in graph.calls:
        node = graph.nodes[call]
        if node.cost_class not in costs:
            costs[node.cost_class] = _unit_cost(graph, node, device)
    return Profile(costs=costs, device=device.name)


def _unit_cost(graph: ModelGraph, node: Node, device: Device) -> UnitCost:
    input_bytes = sum(graph.values[value].spec.num_bytes for value in node.inputs)
    output_bytes = sum(graph.values[value].spec.num_bytes for value in node.outputs)
    names = dict.fromkeys((*graph.units[node.name].parameters, *node.parameters))
    held = [graph.parameters[name] for name in names]
    parameter_bytes = sum(parameter.spec.num_bytes for parameter in held)
    forward_s = (
        device.overhead_s
        + node.flops / (device.flops_per_s * _EFFICIENCY)
        + (input_bytes + output_bytes + parameter_bytes) / device.memory_Bps
    )
    trained = any(parameter.spec.requires_grad and not parameter.is_buffer for parameter in held)
    backward_s = 2 * forward_s
    return UnitCost(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=backward_s / 2 if trained and node.flops else 0.0,
        saved_bytes=node.saved_bytes,
        input_bytes=input_bytes,
        # The gradients of its outputs and inputs, while the backward runs.
        work_bytes=input_bytes + output_bytes,
        flops=node.flops,
        provenance="estimated",
    )
