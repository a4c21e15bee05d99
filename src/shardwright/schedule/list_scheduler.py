"""Builds a schedule for any placement by simulating it.

Every idle rank takes the best ready action: a backward, else a forward, else a deferred weight gradient. The
family's policy picks among several of one kind. Forwards are rationed, because each keeps memory until its
backward has run. For stages on ranks (0, 1, 0), with room for 3 activations on rank 0::

    rank 0 | 0F0 0F1 2F0 2B0==== 2F1 ...      0F1 may take the second of 3 places, but 0F2 not the third:
    rank 1 | .   1F0 1F1 .   .   ...          that is kept for 2F0, without which nothing could ever run again

Why it cannot deadlock. Microbatches pass each stage in order. Suppose that nothing runs and something is
left. Every ready backward would run, so every kept activation waits for a deeper forward that is ready but
rationed. Take the deepest rationed forward, of stage s on rank r. No activation at or below s is kept
anywhere, so the stage itself keeps none, and `Ration.stage` is not the reason. All that r keeps belongs to
stages above s; the last of them to start left a place for each deeper stage of r, so `Ration.rank` is not the
reason. If s is the first stage of r, then r keeps nothing; if not, then r has already admitted the
microbatch: `Ration.microbatches` is not the reason.

The two halves of a split backward: chooses among candidates, joins halves where a split gains nothing.

``I`` and ``W`` apart cost a little more than ``B`` (two walks through the graph instead of one). Where ``W``
directly follows its ``I`` and the stage before does not wait for the gradient, they are joined::

    rank 0 | ... F7 W2 I3 ...         I3 of rank 0 starts after W3 of rank 1 has ended,
    rank 1 | ... I3 W3 F6 ...    ->   so rank 1 may as well run B3

The forward-only schedule, for evaluation and inference.

::

    3 microbatches, stages on ranks (0, 1, 0)
    rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2F2
    rank 1 | .   1F0 1F1 .   .   1F2

Deeper stages go first, so that results leave early and little waits in between.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwright.schedule.action_graph import ActionGraph, compile_actions
from shardwright.schedule.actions import Action, Kind, chain_edges
from shardwright.schedule.placement import Request, Rows, stages_by_rank
from shardwright.schedule.replay import Timeline, action_seconds, replay

Order = Callable[[int, int], tuple[int, ...]]
"""(stage, microbatch) -> key; the smallest goes first."""


def deepest_first(stage: int, microbatch: int) -> tuple[int, ...]:
    """The last stage of the rank before the others."""
    return (-stage, microbatch)


def oldest_first(stage: int, microbatch: int) -> tuple[int, ...]:
    """The lowest microbatch before the others."""
    return (microbatch, stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ration:
    """The number of forwards that may be under way. None: any number.

    Attributes:
        stage: for each stage, microbatches whose forward has started and whose ``B`` or ``I`` has not ended.
        rank: for each rank, activations of all its stages together, from the start of ``F`` to the end of
            ``B`` or ``W``; at least the number of its stages.
        microbatches: on each rank, microbatches begun and not wholly done.
    """

    stage: Sequence[int] | None = None
    rank: Sequence[int] | None = None
    microbatches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The order in which a rank prefers its ready actions.

    Attributes:
        splits_backward: run ``I`` and ``W`` instead of ``B``.
    """

    ration: Ration
    forward_order: Order
    backward_order: Order
    splits_backward: bool = False


def list_schedule(
    policy: Policy,
    request: Request,
    *,
    forward_only: bool = False,
) -> Rows:
    """Plays a policy out with the costs of the request; transfers take no time."""
    player = _Player(policy, request, forward_only)
    seconds = [{kind: cost.seconds(kind) for kind in _KINDS} for cost in request.costs]
    rows: Rows = [[] for _ in player.stages]
    running: list[tuple[float, int, Kind, int]] = []
    idle = set(range(len(rows)))
    now = 0.0
    while True:
        for rank in sorted(idle):
            action = player.choose(rank)
            if action is not None:
                player.start(action)
                rows[rank].append(action)
                idle.remove(rank)
                ends = now + seconds[action.stage][action.kind]
                heapq.heappush(running, (ends, rank, action.kind, action.stage))
        if not running:
            return rows
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank, kind, stage = heapq.heappop(running)
            player.end(kind, stage)
            idle.add(rank)


_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class _Player:
    """The progress of every stage; microbatches pass each stage in order, so counts say all."""

    def __init__(self, policy: Policy, request: Request, forward_only: bool) -> None:
        n = request.num_stages
        self.policy = policy
        self.ranks = request.stage_ranks
        self.m = request.num_microbatches
        self.stages = stages_by_rank(request.stage_ranks)
        self.forward_only = forward_only
        self.forwards_started = [0] * n
        self.forwards_ended = [0] * n
        self.backwards_started = [0] * n
        self.backwards_ended = [0] * n
        self.weights_started = [0] * n
        self.done = [0] * n  # microbatches that the stage keeps nothing of any more
        self.kept = [0] * len(self.stages)  # activations kept by each rank
        self.num_deeper = {s: len(row) - 1 - i for row in self.stages for i, s in enumerate(row)}

    def choose(self, rank: int) -> Action | None:
        """The best action that is ready."""
        if self.forward_only:
            return self._forward(rank)
        action = self._backward(rank) or self._forward(rank)
        return action or (self._weight(rank) if self.policy.splits_backward else None)

    def start(self, action: Action) -> None:
        """Books the start of an action."""
        if action.kind is Kind.FORWARD:
            self.forwards_started[action.stage] += 1
            self.kept[self.ranks[action.stage]] += 1
        elif action.kind is Kind.BACKWARD_WEIGHT:
            self.weights_started[action.stage] += 1
        else:
            self.backwards_started[action.stage] += 1

    def end(self, kind: Kind, stage: int) -> None:
        """Books the end of an action."""
        if kind is Kind.FORWARD:
            self.forwards_ended[stage] += 1
        elif kind is not Kind.BACKWARD_WEIGHT:
            self.backwards_ended[stage] += 1
        frees = Kind.FORWARD if self.forward_only else self._last_kind()
        if kind is frees:
            self.done[stage] += 1
            self.kept[self.ranks[stage]] -= 1

    def _last_kind(self) -> Kind:
        return Kind.BACKWARD_WEIGHT if self.policy.splits_backward else Kind.BACKWARD

    def _backward(self, rank: int) -> Action | None:
        best, key = None, None
        for stage in self.stages[rank]:
            microbatch = self.backwards_started[stage]
            if microbatch >= self.forwards_ended[stage]:
                continue
            if stage + 1 < len(self.ranks) and microbatch >= self.backwards_ended[stage + 1]:
                continue
            rival = self.policy.backward_order(stage, microbatch)
            if key is None or rival < key:
                best, key = (stage, microbatch), rival
        kind = Kind.BACKWARD_INPUT if self.policy.splits_backward else Kind.BACKWARD
        return Action(kind, *best) if best else None

    def _forward(self, rank: int) -> Action | None:
        best, key = None, None
        for stage in self.stages[rank]:
            microbatch = self.forwards_started[stage]
            if microbatch >= (self.forwards_ended[stage - 1] if stage else self.m):
                continue
            if not self._is_admitted(rank, stage, microbatch):
                continue
            rival = self.policy.forward_order(stage, microbatch)
            if key is None or rival < key:
                best, key = (stage, microbatch), rival
        return Action(Kind.FORWARD, *best) if best else None

    def _is_admitted(self, rank: int, stage: int, microbatch: int) -> bool:
        ration = self.policy.ration
        stages = self.stages[rank]
        if ration.microbatches is not None and stage == stages[0]:
            begun = microbatch - min(self.done[other] for other in stages)
            if begun >= ration.microbatches:
                return False
        if self.forward_only:
            return True
        if ration.stage is not None and microbatch - self.backwards_ended[stage] >= ration.stage[stage]:
            return False
        # Places for the deeper stages of this rank stay free, or it could fill itself up with early work.
        return ration.rank is None or self.kept[rank] + 1 + self.num_deeper[stage] <= ration.rank[rank]

    def _weight(self, rank: int) -> Action | None:
        owed = [
            (self.weights_started[stage], -stage)
            for stage in self.stages[rank]
            if self.weights_started[stage] < self.backwards_ended[stage]
        ]
        if not owed:
            return None
        microbatch, negative_stage = min(owed)
        return Action(Kind.BACKWARD_WEIGHT, -negative_stage, microbatch)


_RELATIVE_TIE = 1e-9
"""Candidates whose times differ by less are equal: sums of the same seconds in another order."""


def fastest(candidates: Iterable[Rows], request: Request) -> Rows:
    """The candidate that ends first by the request's costs, halves joined; of equals, the first named."""
    best, best_s = None, float("inf")
    for rows in candidates:
        makespan_s = _play(rows, request)[1].makespan
        if best is None or makespan_s < best_s * (1 - _RELATIVE_TIE):
            best, best_s = rows, makespan_s
    return join_halves(best or [], request)


def join_halves(rows: Rows, request: Request) -> Rows:
    """Makes a ``B`` of each ``I`` with its own ``W`` right behind it where nobody waits for the gradient."""
    graph, timeline = _play(rows, request)
    starts = {
        (action.stage, action.microbatch): timeline.starts[number]
        for number, action in enumerate(graph.actions)
        if action.kind is Kind.BACKWARD_INPUT
    }
    joined = []
    for row, numbers in zip(rows, graph.rows, strict=True):
        joined.append(_join_row(row, timeline.ends[numbers.start : numbers.stop], starts))
    return joined


def _join_row(
    row: Sequence[Action], ends: Sequence[float], starts: dict[tuple[int, int], float]
) -> list[Action]:
    joined: list[Action] = []
    for action, end in zip(row, ends, strict=True):
        own_input = Action(Kind.BACKWARD_INPUT, action.stage, action.microbatch)
        if action.kind is Kind.BACKWARD_WEIGHT and joined and joined[-1] == own_input:
            awaited_s = starts.get((action.stage - 1, action.microbatch), float("inf"))
            if awaited_s >= end * (1 - _RELATIVE_TIE):
                joined[-1] = Action(Kind.BACKWARD, action.stage, action.microbatch)
                continue
        joined.append(action)
    return joined


def _play(rows: Rows, request: Request) -> tuple[ActionGraph, Timeline]:
    graph = compile_actions(
        rows,
        stage_ranks=request.stage_ranks,
        num_microbatches=request.num_microbatches,
        edges=chain_edges(request.num_stages),
    )
    return graph, replay(graph, action_seconds(graph, request.costs))


def most_in_flight(row: Sequence[Action]) -> int:
    """The largest number of microbatches that a rank has begun and not wholly done.

    A microbatch is done when every stage of the rank that ran its forward has run its ``B`` or its ``W``.

    >>> row = [Action(Kind(kind), 0, k) for kind, k in (("F", 0), ("F", 1), ("I", 0), ("F", 2), ("W", 0))]
    >>> most_in_flight(row)
    3
    """
    open_forwards: dict[int, int] = {}
    most = 0
    for action in row:
        k = action.microbatch
        if action.kind is Kind.FORWARD:
            open_forwards[k] = open_forwards.get(k, 0) + 1
            most = max(most, len(open_forwards))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            open_forwards[k] -= 1
            if not open_forwards[k]:
                del open_forwards[k]
    return most


def forward_only(request: Request) -> Rows:
    """The forwards alone, in an order that runs on any placement."""
    policy = Policy(
        ration=Ration(microbatches=request.active_microbatches),
        forward_order=deepest_first,
        backward_order=deepest_first,
    )
    return list_schedule(policy, request, forward_only=True)
