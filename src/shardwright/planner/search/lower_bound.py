"""A lower bound on the seconds of a pipeline step, whatever the order of its actions.

No rank starts before its first input has reached it, and its last gradient still has to travel back::

    rank 0   [F][F][F]                    [B][B][B]
    rank 1   ---[ all that rank 1 computes ]---          way there + work + way back
"""

from collections.abc import Sequence

from shardwright.planner.partition.layout import Layout
from shardwright.schedule import Edge, Kind

__all__ = ["least_seconds"]


def least_seconds(
    layout: Layout,
    *,
    num_microbatches: int,
    may_split: bool = True,
    overhead_s: float = 0.0,
    forward_overhead_s: float = 0.0,
) -> float:
    """A lower bound on the simulated seconds of any schedule of a layout, in closed form."""
    costs, edges, m = layout.stage_costs(), layout.edges(), num_microbatches
    forward = [cost.forward_s + overhead_s + forward_overhead_s for cost in costs]
    backward = [cost.seconds(Kind.BACKWARD) + overhead_s for cost in costs]
    until_input = list(backward)
    if may_split:
        inputs = [cost.seconds(Kind.BACKWARD_INPUT) + overhead_s for cost in costs]
        weights = [cost.seconds(Kind.BACKWARD_WEIGHT) + overhead_s for cost in costs]
        backward = [min(b, i + w) for b, i, w in zip(backward, inputs, weights, strict=True)]
        until_input = list(map(min, until_input, inputs))
    there, back = _ways(edges, forward, until_input)
    least_s = 0.0
    for rank in range(layout.num_ranks):
        stages = layout.stages_of(rank)
        start_s, return_s = min(there[s] for s in stages), min(back[s] for s in stages)
        least_s = max(
            least_s,
            start_s + m * sum(forward[s] + backward[s] for s in stages),
            start_s + m * sum(forward[s] + until_input[s] for s in stages) + return_s,
        )
    return least_s


def _ways(
    edges: Sequence[Edge], forward: Sequence[float], until_input: Sequence[float]
) -> tuple[list[float], list[float]]:
    """For each stage: seconds of the stages before its first forward, and after its last gradient."""
    there, back = [0.0] * len(forward), [0.0] * len(forward)
    for edge in edges:  # by source: whatever leads there came before
        there[edge.target] = max(there[edge.target], there[edge.source] + forward[edge.source])
        if edge.has_gradient:
            back[edge.target] = max(back[edge.target], back[edge.source] + until_input[edge.source])
    return there, back
