"""How much memory each rank needs at its peak.

For one rank, in bytes::

    parameters    of its stages, each once, buffers included
    gradients     one for each trained parameter, in its type
    optimizer     state, by default two numbers for each trained parameter (Adam)
    activations   for every microbatch in flight, what its stages keep for the backward
    work          the largest temporary: of any unit, or of a recomputed unit while it is recomputed
"""

from collections.abc import Sequence

import numpy as np

from shardwright.plan import MemoryPrediction
from shardwright.planner.layout import Layout
from shardwright.schedule import Kind, Schedule

__all__ = ["in_flight", "rank_memory", "work_bytes"]


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the most microbatches between the start of a forward and the end of the backward.

    It follows from the order of the rows alone, whatever the actions cost. A backward that is split keeps its
    activations until ``W``.
    """
    most = [0] * schedule.num_stages
    for row in schedule.actions:
        now = [0] * schedule.num_stages
        for action in row:
            if action.kind is Kind.FORWARD:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind is Kind.BACKWARD or action.kind is Kind.BACKWARD_WEIGHT:
                now[action.stage] -= 1
    return tuple(most)


def rank_memory(
    layout: Layout, *, activation_bytes: Sequence[int], optimizer_factor: float = 2.0
) -> tuple[MemoryPrediction, ...]:
    """Peak memory of each rank.

    Args:
        layout: where every call runs.
        activation_bytes: of each rank, the peak of what all its microbatches in flight keep.
        optimizer_factor: bytes of optimizer state for each byte of a trained parameter.
    """
    return tuple(
        MemoryPrediction(
            parameters=held,
            gradients=trained,
            optimizer=round(trained * optimizer_factor),
            activations=int(activations),
            work=work,
        )
        for (held, trained), activations, work in zip(
            layout.parameter_bytes(), activation_bytes, work_bytes(layout), strict=True
        )
    )


def work_bytes(layout: Layout) -> list[int]:
    """For each rank, the largest temporary memory of any of its calls."""
    chain = layout.chain
    again = np.where(layout.recompute, chain.saved_bytes - chain.kept_bytes, 0.0)
    by_stage = np.maximum.reduceat(chain.work_bytes + again, np.asarray(layout.cuts[:-1]))
    found = np.zeros(layout.num_ranks)
    np.maximum.at(found, np.asarray(layout.ranks), by_stage)
    return [int(value) for value in found]
