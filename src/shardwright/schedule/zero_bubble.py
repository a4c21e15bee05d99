"""The families that split the backward: ZB-H1, ZB-V.

ZB-H1: 1F1B with the backward split, and weight gradients deferred to fill the bubble.

::

    5 microbatches, F = I = W = 1
    rank 0 | F0 F1 F2 .  .  B0=== F3 B1=== F4 B2=== B3=== B4===
    rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Stage s of p keeps p - s microbatches between F and I, as in 1F1B, and defers s weight gradients, so that
every rank keeps p, like the first rank of 1F1B. With equal stages and p microbatches or more the bubble is (p
- 1)(tF + tI - tW), where tW is at most tI; a longer W gains nothing more.

Source: Qi et al., "Zero bubble pipeline parallelism", 2023, section 2.3.

ZB-V: two stages per rank, laid out as a V, without a bubble while the pipeline is full.

::

    2 ranks, 4 microbatches, F = I = W = 1; rank 0 runs stages 0 and 3, rank 1 runs 1 and 2
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1==== 0F3 0B0==== 3F2 3B2==== 0B1==== 3F3 3B3==== ...
    rank 1 | .   1F0 2F0 1F1 2F1 2B0==== 1F2 1B0==== 2F2 2B1==== 1F3 1I1 1W1 2F3 2B2==== 1I2 2I3 ...

The rank of the first stage also makes the first gradient, p units earlier than the end of a chain would. Each
rank keeps at most 2p activations of (half-sized) stages, as much as the first rank of 1F1B. With equal
stages, F = I = W and 2p - 1 microbatches or more, it is busy from its first action to its last; rank p - 1
starts p - 1 forwards late, and that is the whole bubble.

Source: Qi et al., "Zero bubble pipeline parallelism", 2023, section 6.
"""

from collections.abc import Iterator

from shardwright.schedule.actions import Action, Kind
from shardwright.schedule.list_scheduler import (
    Policy,
    Ration,
    deepest_first,
    fastest,
    join_halves,
    list_schedule,
    most_in_flight,
    oldest_first,
)
from shardwright.schedule.placement import Request, Rows, hops_to_end, is_chain, is_v, stages_by_rank


def zb_h1(request: Request) -> Rows:
    """The paper's rows where rank i runs stage i; else the same bounds, p - s being changes of rank + 1."""
    if is_chain(request.stage_ranks):
        rows = [_row_of_h1(request, stage) for stage in range(request.num_stages)]
    else:
        rows = _played_out(request)
    return join_halves(rows, request)


def _played_out(request: Request) -> Rows:
    stages = stages_by_rank(request.stage_ranks)
    hops = hops_to_end(request.stage_ranks)
    policy = Policy(
        ration=Ration(
            stage=[hop + 1 for hop in hops],
            rank=[max(sum(hops[stage] + 1 for stage in row) for row in stages)] * len(stages),
            microbatches=request.active_microbatches,
        ),
        forward_order=deepest_first,
        backward_order=oldest_first,
        splits_backward=True,
    )
    return list_schedule(policy, request)


def _row_of_h1(request: Request, stage: int) -> list[Action]:
    m = request.num_microbatches
    most = min(request.num_stages, request.active_microbatches or m)
    ahead = min(most, request.num_stages - stage)
    debt = most - ahead
    row = [Action(Kind.FORWARD, stage, k) for k in range(min(m, ahead))]
    for k in range(m):
        row.append(Action(Kind.BACKWARD_INPUT, stage, k))
        if k >= debt:
            row.append(Action(Kind.BACKWARD_WEIGHT, stage, k - debt))
        if k + ahead < m:
            row.append(Action(Kind.FORWARD, stage, k + ahead))
    return row + [Action(Kind.BACKWARD_WEIGHT, stage, k) for k in range(max(m - debt, 0), m)]


def zb_v(request: Request) -> Rows:
    """The paper's rows or, where another order of the same work under the same bounds is faster, that one."""
    return fastest(_candidates(request), request)


def _candidates(request: Request) -> Iterator[Rows]:
    p = request.num_ranks
    bound = request.active_microbatches
    if is_v(request.stage_ranks):
        rows = [_row_of_v(request, rank) for rank in range(p)]
        if bound is None or max(map(most_in_flight, rows)) <= bound:
            yield rows
    stages = stages_by_rank(request.stage_ranks)
    for backward_order in (oldest_first, deepest_first):
        policy = Policy(
            ration=Ration(rank=[len(row) * p for row in stages], microbatches=bound),
            forward_order=deepest_first,
            backward_order=backward_order,
            splits_backward=True,
        )
        yield list_schedule(policy, request)


def _row_of_v(request: Request, rank: int) -> list[Action]:
    """Five phases; each takes what is left of its kind (see `_Row.take`).

    1. Fill: forwards down, until the first of them is back up.
    2. Turn: forwards up and down by turns.
    3. First gradients: forward, ``I`` and ``W`` of the upper stage.
    4. Steady: the same, and forward, ``I`` and ``W`` of the lower stage, by turns.
    5. Drain: ``I`` by turns with the weights put off, then all weights.
    """
    p, m = request.num_ranks, request.num_microbatches
    row = _Row(m)
    down, up = rank, 2 * p - 1 - rank
    row.take("F" * (2 * (p - rank) - 1), down)
    for _ in range(rank):
        row.take("F", up)
        row.take("F", down)
    for _ in range(p - rank):
        row.take("FIW", up)
    while row.count("F", down) < m or row.count("F", up) < m:
        row.take("FIW", down)
        row.take("FIW", up)
    for _ in range(rank):
        row.take("I", down)
        row.take("I", up)
    for stage, kinds in ((down, "IW"), (up, "IW")):
        row.take(kinds * m, stage)
    return row.actions


class _Row:
    """A row under construction."""

    def __init__(self, num_microbatches: int) -> None:
        self.actions: list[Action] = []
        self._m = num_microbatches
        self._next: dict[tuple[str, int], int] = {}

    def count(self, kind: str, stage: int) -> int:
        return self._next.get((kind, stage), 0)

    def take(self, kinds: str, stage: int) -> None:
        """Appends the next microbatch of each kind, none where all are in the row."""
        for kind in kinds:
            microbatch = self.count(kind, stage)
            if microbatch < self._m:
                self._next[kind, stage] = microbatch + 1
                self.actions.append(Action(Kind(kind), stage, microbatch))
