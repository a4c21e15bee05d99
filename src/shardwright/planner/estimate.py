"""A profile without running anything: from FLOPs, bytes and the rates of a device.

The forward of a unit takes ``overhead + flops / rate + bytes / bandwidth``: an additive roofline, smooth
where one limit takes over from the other. Bytes are those of its inputs, outputs and parameters. The
backward takes twice as long; of units that compute with trained parameters, half of it is the gradient of
the weights. Operations between units cost the same, without the overhead.
"""

from shardwright.cluster import Device
from shardwright.model_graph import ModelGraph, Node
from shardwright.profile import Profile, UnitCost

__all__ = ["estimate_profile"]


def estimate_profile(graph: ModelGraph, *, device: Device) -> Profile:
    """Estimates the cost of every class of units and operations.

    Args:
        graph: the traced model, with FLOPs and saved bytes.
        device: peak rates.
    """
    costs: dict[str, UnitCost] = {}
    for node in graph.nodes:
        if not node.free and node.cost_class not in costs and (node.cost_class or node.kind == "unit"):
            costs[node.cost_class] = _cost(graph, node, device)
    return Profile(costs=costs, device=device.name)


def _cost(graph: ModelGraph, node: Node, device: Device) -> UnitCost:
    inputs = [graph.values[value].spec for value in node.inputs]
    outputs = [graph.values[value].spec for value in node.outputs]
    own = graph.units[node.name].parameters if node.kind == "unit" else ()
    held = [graph.parameters[name] for name in dict.fromkeys((*own, *node.parameters))]
    input_bytes = sum(spec.num_bytes for spec in inputs)
    num_bytes = input_bytes + sum(spec.num_bytes for spec in (*outputs, *(p.spec for p in held)))
    forward_s = (
        device.overhead_s * (node.kind == "unit")
        + node.flops / (device.flops_per_s * device.reached)
        + num_bytes / device.memory_Bps
    )
    backward_s = 2 * forward_s if any(spec.requires_grad for spec in outputs) else 0.0
    trained = any(parameter.spec.requires_grad and not parameter.is_buffer for parameter in held)
    return UnitCost(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=backward_s / 2 if trained and node.flops and node.kind == "unit" else 0.0,
        saved_bytes=node.saved_bytes,
        work_bytes=node.work_bytes,
        weight_bytes=node.weight_bytes,
        split_work_bytes=node.split_work_bytes,
        input_bytes=input_bytes,
        flops=node.flops,
        provenance="estimated",
    )
