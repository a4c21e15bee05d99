"""How much memory each rank needs at its peak.

For one rank, in bytes::

    parameters    of its stages, each once, buffers included
    gradients     one for each trained parameter, in its type
    optimizer     state, by default two numbers for each trained parameter (Adam)
    activations   for every microbatch in flight, what its stages keep for the backward
    batch         the batch; ranks but the first have one of their own too, which is not used
    work          the largest temporary of a call, and messages under way
"""

from collections.abc import Sequence

import numpy as np

from shardwright.plan import MemoryPrediction
from shardwright.planner.layout import Layout
from shardwright.schedule import Kind, Schedule

__all__ = ["in_flight", "message_bytes", "rank_memory", "work_bytes"]


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
    layout: Layout, *, activation_bytes: Sequence[int], optimizer_factor: float = 2.0, batch_bytes: int = 0
) -> tuple[MemoryPrediction, ...]:
    """Peak memory of each rank.

    Args:
        layout: where every call runs.
        activation_bytes: of each rank, the peak of what all its microbatches in flight keep.
        optimizer_factor: bytes of optimizer state for each byte of a trained parameter.
        batch_bytes: the tensors of a batch.
    """
    return tuple(
        MemoryPrediction(
            parameters=held,
            gradients=trained,
            optimizer=round(trained * optimizer_factor),
            activations=int(activations),
            batch=batch_bytes * (1 if rank == 0 else 2),
            work=work + message,
        )
        for rank, ((held, trained), activations, work, message) in enumerate(
            zip(
                layout.parameter_bytes(),
                activation_bytes,
                work_bytes(layout),
                message_bytes(layout),
                strict=True,
            )
        )
    )


def work_bytes(layout: Layout) -> list[int]:
    """For each rank, the most bytes that any of its calls takes on top of all that its stages keep.

    While a call runs, what the calls behind it keep is not there: not yet in the forward, no more in the
    backward.
    """
    chain = layout.chain
    again = np.where(layout.recompute, chain.saved_bytes - chain.kept_bytes, 0.0)
    saved = layout.saved_bytes()
    found = [0.0] * layout.num_ranks
    for stage, rank in enumerate(layout.ranks):
        behind = 0.0
        for call in reversed(layout.calls(stage)):
            found[rank] = max(found[rank], float(chain.work_bytes[call] + again[call]) - behind)
            behind += float(saved[call])
    return [int(value) for value in found]


def message_bytes(layout: Layout) -> list[int]:
    """For each rank, the bytes of messages that wait to be used or to leave.

    A receive is posted some actions before its use (`lower`), and the gradients from which a backward starts
    stay until it ends.
    """
    values = [0] * layout.num_ranks
    gradients = [0] * layout.num_ranks
    for edge in layout.edges():
        source, target = layout.ranks[edge.source], layout.ranks[edge.target]
        if source != target:
            values[target] = max(values[target], edge.num_bytes)
            gradients[source] = max(gradients[source], edge.backward_bytes)
    return [value + 2 * gradient for value, gradient in zip(values, gradients, strict=True)]
