"""In-place changes that a unit may make in a microbatch although its trace had none.

A unit that reads values may change its input or leave it (``if x.mean() > 1: x.clamp_(-1, 1)``). Without the
change in the trace, other stages continue with the unchanged tensor.
"""

from collections.abc import Sequence

from shardwright.runtime.traced import TracedFunction, TracedStep

__all__ = ["may_change"]


def may_change(
    trace: TracedFunction, step: TracedStep, homes: Sequence[int], home_of: Sequence[int]
) -> frozenset[int] | None:
    """Positions of the arguments that a unit may change, as nobody would miss it.

    None where there is nothing to watch: it is no unit, or does not look at values.
    """
    nodes = trace.graph.nodes
    if step.node is None or not step.looks_at_values or nodes[step.node].kind != "unit":
        return None
    stage = homes[step.node]
    found = {change.position for change in step.changes if change.position is not None}
    elsewhere = [
        (node, trace.tensors.memory[value])
        for node, home in enumerate(homes)
        if home != stage
        for value in nodes[node].inputs
    ]
    returned = {trace.tensors.memory[value] for value in trace.graph.outputs}
    for position, value in step.reads:
        memory = trace.tensors.memory[value]
        readers = [node for node, other in elsewhere if other == memory]
        if home_of[value] == stage:  # it is sent when the stage ends: with the change
            fine = all(node > step.node for node in readers)
        else:
            fine = all(node < step.node for node in readers) and memory not in returned
        if fine:
            found.add(position)
    return frozenset(found)
