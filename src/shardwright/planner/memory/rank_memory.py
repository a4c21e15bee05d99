"""The peak memory of each rank.

For one rank, in bytes::

    parameters    of its stages, each once, buffers included
    gradients     one for each trained parameter, in its type
    optimizer     state, by default two numbers for each trained parameter (Adam)
    activations   for every microbatch in flight, what its stages keep for the backward
    batch         the batch; ranks but the first have one of their own too, which is not used
    work          the largest temporary of a call, and messages; where it is more, what Adam takes
                  for its largest parameter when there are no activations
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.plan import MemoryPrediction, Plan
from shardwright.planner.adopt import schedule_of
from shardwright.planner.partition.layout import Layout
from shardwright.schedule import Kind, Schedule, StageCost

__all__ = [
    "Messages",
    "in_flight",
    "messages",
    "offloaded_bytes",
    "rank_memory",
    "scheduled_work_bytes",
    "update_bytes",
    "work_bytes",
]


# Numbers of state for each number of a parameter.
_ADAM = 2.0

# Messages from one rank to another that are written and not yet read (see `Messages`): where no simulation
# tells, and at most, since the sender of one more waits (`comm.local_link`).
_UNREAD, _MOST_UNREAD = 2, 4


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


def offloaded_bytes(plan: Plan) -> list[int]:
    """For each pipeline rank of a plan, the most bytes that are offloaded at a time."""
    found = [0] * (max(plan.stage_ranks) + 1)
    if plan.prediction is None or not any(stage.offload for stage in plan.stages):
        return found
    flying = in_flight(schedule_of(plan))
    for rank, number, stage in zip(plan.stage_ranks, flying, plan.prediction.stages, strict=True):
        found[rank] += number * stage.offload_bytes
    return found


def rank_memory(
    layout: Layout,
    *,
    activation_bytes: Sequence[int],
    optimizer_factor: float = 2.0,
    batch_bytes: int = 0,
    work: Sequence[int] | None = None,
) -> tuple[MemoryPrediction, ...]:
    """Peak memory of each rank.

    Args:
        layout: where every call runs.
        activation_bytes: of each rank, the peak of what all its microbatches in flight keep.
        optimizer_factor: bytes of optimizer state for each byte of a trained parameter.
        batch_bytes: the tensors of a batch.
        work: of each rank, its temporaries and messages; None for an upper bound, whatever the schedule.
    """
    work = work_bytes(layout) if work is None else work
    return tuple(
        MemoryPrediction(
            parameters_bytes=state.parameters,
            gradients_bytes=state.gradients,
            optimizer_bytes=round(state.optimized * optimizer_factor),
            activations_bytes=int(activations),
            batch_bytes=batch_bytes * (1 if rank == 0 else 2),
            work_bytes=max(temporary, update - int(activations)),
        )
        for rank, (state, activations, temporary, update) in enumerate(
            zip(
                layout.state_bytes(),
                activation_bytes,
                work,
                update_bytes(layout, optimizer_factor=optimizer_factor),
                strict=True,
            )
        )
    )


def work_bytes(layout: Layout) -> list[int]:
    """For each rank, the most bytes that calls and messages take on top of all that its stages keep."""
    found = [0] * layout.num_ranks
    for rank, work in zip(layout.ranks, _stage_work(layout), strict=True):
        found[rank] = max(found[rank], int(work))
    return [work + one.num_bytes() for work, one in zip(found, messages(layout), strict=True)]


def scheduled_work_bytes(
    schedule: Schedule,
    layout: Layout,
    costs: Sequence[StageCost],
    unread: Mapping[tuple[int, int], int] | None = None,
) -> list[int]:
    """For each rank, the bytes by which its peak exceeds the most that it keeps, in this order of actions.

    That is less than `work_bytes` where large temporaries and messages come while little is kept.

    Args:
        schedule: the order.
        layout: where every call runs.
        costs: of each stage.
        unread: as in the schedule's `Simulation`; None counts two messages everywhere.
    """
    forward = _stage_work(layout, recompute=False)
    backward = _stage_work(layout)
    split = _stage_work(layout, split=True)
    found = []
    for row, under_way in zip(schedule.actions, messages(layout, unread), strict=True):
        forwards = sum(action.kind is Kind.FORWARD for action in row)
        held = kept = peak = 0.0
        for action in row:
            if not action.is_compute:
                continue
            cost, stage = costs[action.stage], action.stage
            left = cost.left_bytes
            around = under_way.num_bytes(forwards_left=forwards > 0)
            if action.kind is Kind.FORWARD:
                forwards -= 1
                held += cost.saved_bytes
                peak = max(peak, held + forward[stage] + around)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                peak = max(peak, held + around)
                held -= left
            elif action.kind is Kind.BACKWARD_INPUT:
                peak = max(peak, held + split[stage] + around)
                held += left - cost.saved_bytes
            else:
                peak = max(peak, held + backward[stage] + around)
                held -= cost.saved_bytes
            kept = max(kept, held)
        found.append(int(max(peak, kept) - kept))
    return found


def _stage_work(layout: Layout, *, recompute: bool = True, split: bool = False) -> list[float]:
    """For each stage, the most bytes that any of its calls takes on top of what the stage keeps.

    While a call runs, what the calls behind it keep is not there: not yet in the forward, no more in the
    backward, but for what is left for the gradients of weights.

    Args:
        layout: where every call runs.
        recompute: count what is recomputed.
        split: the backward leaves the gradients of weights for later.
    """
    chain = layout.chain
    saved = layout.saved_bytes() - layout.leaving_bytes()
    again = np.where(
        layout.recompute & recompute, chain.column("saved_bytes") - chain.column("kept_bytes"), 0.0
    )
    left = (
        np.where(np.isnan(chain.column("weight_bytes")), saved, chain.column("weight_bytes"))
        if split
        else np.zeros(len(saved))
    )
    work = chain.column("split_work_bytes") if split else chain.column("work_bytes")
    found = [0.0] * layout.num_stages
    for stage in range(layout.num_stages):
        behind = 0.0
        for call in reversed(layout.calls(stage)):
            found[stage] = max(found[stage], float(work[call] + again[call]) - behind)
            behind += float(saved[call] - left[call])
    return found


@dataclass(frozen=True, slots=True)
class Messages:
    """Bytes of the messages of one rank.

    What leaves is copied at once into memory that sender and receiver share, one ring for each rank that it
    sends to (`comm.local_link`). A ring grows to what was unread in it at once, and stays so large for the
    whole run. Mostly that is one of the largest messages, and a few where a rank runs ahead: all along in
    GPipe, and before its first backward on the first rank in the others. How many depends on who is faster:
    the simulation tells, and without one, two are counted. Between hosts, two are about the sends under way.

    Attributes:
        value: the largest that comes in; a receive is posted some actions before its use (`lower`).
        gradient: the largest that comes in; another stays until the backward that starts from it ends.
        leaving: all rings.
    """

    value: int
    gradient: int
    leaving: int

    def num_bytes(self, *, forwards_left: bool = True) -> int:
        """The bytes of all messages that may be there at once."""
        return self.value * forwards_left + 2 * self.gradient + self.leaving


def messages(layout: Layout, unread: Mapping[tuple[int, int], int] | None = None) -> list[Messages]:
    """The messages of each rank; `unread` is that of a `Simulation`."""
    values = [0] * layout.num_ranks
    gradients = [0] * layout.num_ranks
    largest: dict[tuple[int, int], int] = {}
    for edge in layout.edges():
        source, target = layout.ranks[edge.source], layout.ranks[edge.target]
        if source != target:
            values[target] = max(values[target], edge.num_bytes)
            gradients[source] = max(gradients[source], edge.backward_bytes)
            largest[source, target] = max(largest.get((source, target), 0), edge.num_bytes)
            largest[target, source] = max(largest.get((target, source), 0), edge.backward_bytes)
    leaving = [0] * layout.num_ranks
    for pair, num_bytes in largest.items():
        leaving[pair[0]] += min((unread or {}).get(pair, _UNREAD), _MOST_UNREAD) * num_bytes
    return [Messages(*each) for each in zip(values, gradients, leaving, strict=True)]


def update_bytes(layout: Layout, *, optimizer_factor: float) -> list[int]:
    """For each rank, what an update of its largest parameter takes: Adam computes with two copies."""
    found = [0] * layout.num_ranks
    rank_of = np.asarray(layout.ranks)[layout.stage_of_call].tolist()
    for use in layout.chain.parameters:
        if use.trained and optimizer_factor >= _ADAM:
            for rank in {rank_of[call] for call in use.calls}:
                found[rank] = max(found[rank], 2 * use.num_bytes)
    return found
