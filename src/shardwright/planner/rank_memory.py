"""The peak memory of each rank.

For one rank, in bytes::

    parameters    of its stages, each once, buffers included
    gradients     one for each trained parameter, in its type, as many as are there at the peak: the first
                  backward of a stage makes them
    optimizer     state, by default two numbers for each trained parameter (Adam)
    activations   for every microbatch in flight, what its stages keep for the backward
    batch         the batch; ranks but the first have one of their own too, which is not used
    work          the largest temporary of a call, and messages; where it is more, what Adam takes
                  for its largest parameter when there are no activations

Before the first backward no gradient is there, which counts where all forwards come before it: with one
microbatch, with GPipe, and on ranks with no more microbatches than stages follow::

    bytes      ▄▄▄▄▄▄▄                activations
            ▄▄████████▄▄▁▁▁▁▁▁▁
            ░░░░░░░░░░░▒▒▓▓▓▓▓▓  ▓▓   gradients: one unit's come while what it kept goes
             forward   backward  update

Of parameters that replicas share, a rank keeps its rows of them; whole ones are there until they are reduced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.plan import MemoryPrediction, Plan
from shardwright.planner.layout import Layout
from shardwright.planner.replay import schedule_of
from shardwright.schedule import Kind, Schedule, StageCost

# Numbers of state for each number of a parameter.
_ADAM = 2.0

# Messages from one rank to another that are written and not yet read (see `_Messages`): where no simulation
# tells, and at most, since the sender of one more waits (`comm.local_link`).
_UNREAD, _MOST_UNREAD = 2, 4


class Above(NamedTuple):
    """What a rank has at its peak, above the most that its stages keep."""

    num_bytes: int
    gradients: int


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
    above: Sequence[Above] | None = None,
) -> tuple[MemoryPrediction, ...]:
    updates = _update_bytes(layout, optimizer_factor=optimizer_factor)
    rows = zip(
        layout.state_bytes(), map(int, activation_bytes), above or above_at_most(layout), updates, strict=True
    )
    found = []
    for rank, (state, activations, at_peak, update) in enumerate(rows):
        at_update = state.gradients + update - activations
        at_peak = max(at_peak, Above(at_update, state.gradients))
        gradients = min(at_peak.gradients, at_peak.num_bytes)
        found.append(
            MemoryPrediction(
                parameters_bytes=state.parameters,
                gradients_bytes=gradients,
                optimizer_bytes=round(state.optimized * optimizer_factor),
                activations_bytes=activations,
                batch_bytes=batch_bytes * (1 if rank == 0 else 2),
                work_bytes=at_peak.num_bytes - gradients,
            )
        )
    return tuple(found)


def work_bytes(layout: Layout) -> list[int]:
    """For each rank, the most bytes that calls and messages take on top of all that its stages keep."""
    found = [0] * layout.num_ranks
    for rank, work in zip(layout.ranks, _stage_above(layout), strict=True):
        found[rank] = max(found[rank], work.num_bytes)
    return [work + one.num_bytes() for work, one in zip(found, messages(layout), strict=True)]


def above_at_most(
    layout: Layout, in_flight: Sequence[int] = (), *, num_microbatches: int | None = None
) -> list[Above]:
    """For each rank, an upper bound of what it has above all that its stages keep."""
    states = layout.state_bytes()
    found = [
        Above(work + state.gradients, state.gradients)
        for work, state in zip(work_bytes(layout), states, strict=True)
    ]
    late = [
        rank
        for rank in range(layout.num_ranks)
        if gradients_come_late(layout, rank, in_flight, num_microbatches=num_microbatches)
    ]
    if not late:
        return found
    costs, first, own = layout.stage_costs(), _stage_above(layout, first=True), layout.first_gradients()
    under_ways = messages(layout)
    for rank in late:
        (stage,) = layout.stages_of(rank)
        state, under_way = states[rank], under_ways[rank]
        work = found[rank].num_bytes - state.gradients
        always = state.gradients - int(own[layout.calls(stage)].sum())
        before = Above(
            always + first[stage].num_bytes + under_way.num_bytes(), always + first[stage].gradients
        )
        # The next backward begins with all gradients, and without what the first microbatch kept.
        work = work if num_microbatches != 1 else under_way.num_bytes()
        after = Above(work + state.gradients - costs[stage].saved_bytes, state.gradients)
        found[rank] = max(before, after)
    return found


def gradients_come_late(
    layout: Layout, rank: int, in_flight: Sequence[int], *, num_microbatches: int | None
) -> bool:
    """Whether all forwards of a rank come before its first backward, which makes the gradients."""
    stages = layout.stages_of(rank)
    return num_microbatches is not None and len(stages) == 1 and in_flight[stages[0]] >= num_microbatches


def scheduled_above(
    schedule: Schedule,
    layout: Layout,
    costs: Sequence[StageCost],
    unread: Mapping[tuple[int, int], int] | None = None,
) -> list[Above]:
    """For each rank, by how much its peak exceeds the most that it keeps, in this order of actions."""
    works = _StageWorks(layout)
    rows = zip(schedule.actions, layout.state_bytes(), messages(layout, unread), strict=True)
    found = []
    for rank, (row, state, under_way) in enumerate(rows):
        to_come = {stage: works.gradients(stage) for stage in layout.stages_of(rank)}
        forwards = sum(action.kind is Kind.FORWARD for action in row)
        held = kept = 0
        came = state.gradients - sum(sum(each.values()) for each in to_come.values())
        peak = Above(came, came)
        for action in row:
            if not action.is_compute:
                continue
            kind, cost, new = action.kind, costs[action.stage], to_come[action.stage]
            around = under_way.num_bytes(forwards_left=forwards > 0)
            if kind is Kind.FORWARD:
                forwards -= 1
                held += cost.saved_bytes
            work = works.during(kind, action.stage, first=any(new.values()))
            peak = max(peak, Above(held + around + came + work.num_bytes, came + work.gradients))
            if kind is Kind.FORWARD:
                kept = max(kept, held)
                continue
            came += sum(new.pop(part, 0) for part in _PARTS[kind])
            held -= cost.left_bytes if kind is Kind.BACKWARD_WEIGHT else cost.saved_bytes
            held += cost.left_bytes if kind is Kind.BACKWARD_INPUT else 0
            peak = max(peak, Above(held + around + came, came))
            kept = max(kept, held)
        found.append(Above(max(peak.num_bytes - kept, 0), peak.gradients))
    return found


_PARTS = {
    Kind.BACKWARD: (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    Kind.BACKWARD_INPUT: (Kind.BACKWARD_INPUT,),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_WEIGHT,),
}
"""The parts of a backward, by its kind."""


class _StageWorks:
    """What the actions of stages take on top of what they keep."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._forward = _stage_above(layout, recompute=False)
        self._backward: dict[tuple[bool, bool], list[Above]] = {}
        put_off, of_calls = _put_off(layout), layout.first_gradients()
        cuts = np.asarray(layout.cuts[:-1])
        self._inputs = np.add.reduceat(np.where(put_off, 0, of_calls), cuts).tolist()
        self._weights = np.add.reduceat(np.where(put_off, of_calls, 0), cuts).tolist()

    def gradients(self, stage: int) -> dict[Kind, int]:
        """Bytes of the gradients that its first backward makes, by the part of it that does."""
        return {Kind.BACKWARD_INPUT: self._inputs[stage], Kind.BACKWARD_WEIGHT: self._weights[stage]}

    def during(self, kind: Kind, stage: int, *, first: bool) -> Above:
        """The most while an action runs; `first`: it makes the gradients, to which others add."""
        if kind is Kind.FORWARD:
            return self._forward[stage]
        if kind is Kind.BACKWARD_WEIGHT:
            return Above(0, 0)
        split = kind is Kind.BACKWARD_INPUT
        if (split, first) not in self._backward:
            self._backward[split, first] = _stage_above(self._layout, split=split, first=first)
        return self._backward[split, first][stage]


def _put_off(layout: Layout) -> NDArray[np.bool_]:
    """Whether each call leaves the gradients of its weights for later, where the backward is split."""
    found: NDArray[np.bool_] = layout.chain.column("weight_bytes") > 0  # not where it is not known
    return found


def _stage_above(
    layout: Layout, *, recompute: bool = True, split: bool = False, first: bool = False
) -> list[Above]:
    """For each stage, the most bytes that any of its calls takes on top of what the stage keeps.

    While a call runs, what the calls behind it keep is not there: not yet in the forward, no more in the
    backward, but for what is left for the gradients of weights.
    """
    chain = layout.chain
    saved = layout.saved_bytes() - layout.leaving_bytes()
    again = np.where(
        layout.recompute & recompute, chain.column("saved_bytes") - chain.column("kept_bytes"), 0.0
    )
    left = new = np.zeros(len(saved))
    reduced = layout.reduced_gradients()
    if first:
        new = np.where(_put_off(layout) & split, 0, layout.first_gradients())
    if split:
        left = np.where(np.isnan(chain.column("weight_bytes")), saved, chain.column("weight_bytes"))
    work = chain.column("split_work_bytes") if split else chain.column("work_bytes")
    found = [Above(0, 0)] * layout.num_stages
    for stage in range(layout.num_stages):
        behind, came = 0.0, 0
        for call in reversed(layout.calls(stage)):
            gradients = came + int(reduced[call]) * recompute
            taken = int(work[call] + again[call] - behind) + gradients
            found[stage] = max(found[stage], Above(taken, gradients))
            behind += float(saved[call] - left[call])
            came += int(new[call])
    return found


@dataclass(frozen=True, slots=True)
class _Messages:
    """Bytes of the messages of one rank.

    What leaves is copied at once into memory that sender and receiver share, one ring for each rank that it
    sends to (`comm.local_link`). A ring grows to what was unread in it at once, and stays so large for the
    whole run. Mostly that is one of the largest messages, and a few where a rank runs ahead: all along in
    GPipe, and before its first backward on the first rank in the others. How many depends on who is faster:
    the simulation tells, and without one, two are counted. Between hosts, two are about the sends under way.

    Attributes:
        value: the largest that comes in; a receive is posted some actions before its use (`lower`).
        gradient: the largest that comes in; another stays until the backward that starts from it ends.
    """

    value: int
    gradient: int
    leaving: int

    def num_bytes(self, *, forwards_left: bool = True) -> int:
        """The bytes of all messages that may be there at once."""
        return self.value * forwards_left + 2 * self.gradient + self.leaving


def messages(layout: Layout, unread: Mapping[tuple[int, int], int] | None = None) -> list[_Messages]:
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
    return [_Messages(*each) for each in zip(values, gradients, leaving, strict=True)]


def _update_bytes(layout: Layout, *, optimizer_factor: float) -> list[int]:
    """For each rank, what an update of its largest parameter takes: Adam computes with two copies."""
    found = [0] * layout.num_ranks
    rank_of = np.asarray(layout.ranks)[layout.stage_of_call].tolist()
    for use in layout.chain.parameters:
        if use.trained and optimizer_factor >= _ADAM:
            for rank in {rank_of[call] for call in use.calls}:
                found[rank] = max(found[rank], 2 * use.num_bytes)
    return found
