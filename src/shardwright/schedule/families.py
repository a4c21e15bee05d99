"""The rows of each family: GPipe, 1F1B and interleaved 1F1B; with a split backward, ZB-H1 and ZB-V.

GPipe: all forwards, then all backwards.

::

    4 microbatches
    rank 0 | F0 F1 F2 F3 .  .  .  B0=== B1=== B2=== B3===
    rank 1 | .  F0 F1 F2 F3 B0=== B1=== B2=== B3===

It keeps all microbatches at once. With fewer active microbatches it runs in waves of that many. Backwards run
from the first microbatch to the last, so that gradients are summed in the same order as in the other
families.

Source: Huang et al., GPipe, 2019.

1F1B: each backward as early as possible, each forward only where a backward has made room.

::

    4 microbatches; rank 0 keeps 3 of them at once, rank 1 two, rank 2 one
    rank 0 | F0 F1 F2 .  .  .  .  B0=== F3 B1=== .  B2=== .  B3===
    rank 1 | .  F0 F1 .  .  B0=== F2 B1=== F3 B2=== .  B3===
    rank 2 | .  .  F0 B0=== F1 B1=== F2 B2=== F3 B3===

Stage s of p keeps at most p - s microbatches: one for each stage that a microbatch still has to pass,
including s itself. The bubble is that of GPipe, which keeps all.

Source: Narayanan et al., PipeDream-Flush, in "Memory-efficient pipeline-parallel DNN training", 2021.

Interleaved 1F1B: several stages per rank, so that the pipeline fills in a fraction of the time.

::

    4 microbatches, 2 ranks, stages 0 and 2 on rank 0, 1 and 3 on rank 1; microbatches go in groups of 2
    rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0==== 0F3 2B1==== 2F2 0B0==== 2F3 0B1==== .   ...
    rank 1 | .   1F0 1F1 3F0 3B0==== 3F1 3B1==== 1F2 1B0==== 1F3 1B1==== 3F2 ...

With v stages on each of p ranks and p microbatches or more, the bubble is v times smaller than that of 1F1B;
transfers are v times as many. Rank r keeps at most 2 (p - r - 1) + (v - 1) g + 1 activations of stages, where
g is the size of the largest group (see `_groups`).

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021, section 2.2.

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
from itertools import pairwise

from shardwright.schedule.actions import Action, Kind
from shardwright.schedule.list_scheduler import (
    Order,
    Policy,
    Ration,
    deepest_first,
    fastest,
    join_halves,
    list_schedule,
    most_in_flight,
    oldest_first,
)
from shardwright.schedule.placement import (
    Request,
    Rows,
    hops_to_end,
    is_chain,
    is_round_robin,
    is_v,
    stages_by_rank,
)


def gpipe(request: Request) -> Rows:
    """The rows of GPipe for any placement.

    Every rank takes its work from one common list (wave, then stage, then microbatch), so that whoever is
    first in the list can always run.
    """
    m = request.num_microbatches
    wave = min(m, request.active_microbatches or m)
    waves = [range(first, min(first + wave, m)) for first in range(0, m, wave)]
    return [
        [
            action
            for microbatches in waves
            for action in (
                *(Action(Kind.FORWARD, s, k) for s in stages for k in microbatches),
                *(Action(Kind.BACKWARD, s, k) for s in reversed(stages) for k in microbatches),
            )
        ]
        for stages in stages_by_rank(request.stage_ranks)
    ]


def one_f_one_b(request: Request) -> Rows:
    """The classic rows where rank i runs stage i; else the same rule, p - s being changes of rank + 1."""
    hops = hops_to_end(request.stage_ranks)
    m = request.num_microbatches
    if is_chain(request.stage_ranks):
        most = min(m, request.active_microbatches or m)
        return [
            _alternate(
                [Action(Kind.FORWARD, stage, k) for k in range(m)],
                [Action(Kind.BACKWARD, stage, k) for k in range(m)],
                num_ahead=min(most, hops[stage] + 1),
            )
            for stage in range(request.num_stages)
        ]
    policy = Policy(
        ration=Ration(stage=[hop + 1 for hop in hops], microbatches=request.active_microbatches),
        forward_order=deepest_first,
        backward_order=deepest_first,
    )
    return list_schedule(policy, request)


def _alternate(forwards: list[Action], backwards: list[Action], *, num_ahead: int) -> list[Action]:
    """Some forwards, then backwards and forwards by turns, then the backwards left.

    >>> forwards = [Action(Kind.FORWARD, 0, k) for k in range(3)]
    >>> backwards = [Action(Kind.BACKWARD, 0, k) for k in range(3)]
    >>> " ".join(map(str, _alternate(forwards, backwards, num_ahead=2)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    row = forwards[:num_ahead]
    for backward, forward in zip(backwards, forwards[num_ahead:], strict=False):
        row += [backward, forward]
    return row + backwards[len(forwards) - num_ahead :]


def interleaved(request: Request) -> Rows:
    """The classic rows where ranks take turns and the bound allows it, else what plays out best."""
    if is_chain(request.stage_ranks):
        return one_f_one_b(request)
    if is_round_robin(request.stage_ranks):
        rows = [_classic_row(request, rank) for rank in range(request.num_ranks)]
        bound = request.active_microbatches
        if bound is None or max(map(most_in_flight, rows)) <= bound:
            return rows
    return fastest(_candidates_of_interleaved(request), request)


def _groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Microbatches in groups of p, or of as little more than p as makes them equal within one.

    A group of fewer than p next to others would deadlock: the ranks run ahead by whole groups.

    >>> _groups(8, 4), _groups(7, 4), _groups(3, 4)
    ([range(0, 4), range(4, 8)], [range(0, 7)], [range(0, 3)])
    """
    number = max(1, num_microbatches // num_ranks)
    cuts = [num_microbatches * index // number for index in range(number + 1)]
    return [range(first, last) for first, last in pairwise(cuts)]


def _classic_row(request: Request, rank: int) -> list[Action]:
    """Group by group, a stage takes all microbatches of the group before the next stage of the rank starts.

    Why it cannot deadlock. Number forwards and backwards in that order, the same on all ranks. Forward i of
    rank 0 needs forward i - g of rank p - 1, where g is the size of its group. That one stands behind
    backwards up to i - g - (v - 1) G - 1, where G is the largest group; each needs one on rank 0 that is g'
    before it, and that stands behind forward i + 2 (p - 1) - g - g' - 1 of rank 0 at most. With g and g' of p
    or more, that is before i. A single group of fewer than p starts no backward on rank 0 before its last
    forward.
    """
    p = request.num_ranks
    v = request.num_stages // p
    groups = _groups(request.num_microbatches, p)
    forwards, backwards = [], []
    for group in groups:
        for chunk in range(v):
            forwards += [Action(Kind.FORWARD, chunk * p + rank, k) for k in group]
            backwards += [Action(Kind.BACKWARD, (v - 1 - chunk) * p + rank, k) for k in group]
    num_ahead = 2 * (p - 1 - rank) + (v - 1) * max(map(len, groups)) + 1
    return _alternate(forwards, backwards, num_ahead=min(len(forwards), num_ahead))


def _candidates_of_interleaved(request: Request) -> Iterator[Rows]:
    """The two orders that were best over some placements and bounds, under two bounds on memory."""
    p = request.num_ranks
    stages = stages_by_rank(request.stage_ranks)
    hops = hops_to_end(request.stage_ranks)
    chunk = {stage: index for row in stages for index, stage in enumerate(row)}
    bound = request.active_microbatches
    group = min(p, bound or p)

    def grouped_forward(stage: int, microbatch: int) -> tuple[int, ...]:
        return (microbatch // group, chunk[stage], microbatch)

    def grouped_backward(stage: int, microbatch: int) -> tuple[int, ...]:
        return (microbatch // group, -chunk[stage], microbatch)

    by_stage = Ration(stage=[hop + 1 for hop in hops], microbatches=bound)
    by_rank = Ration(rank=[len(row) * p for row in stages], microbatches=bound)
    plans: list[tuple[Ration, Order, Order]] = [
        (by_stage, deepest_first, deepest_first),
        (by_rank, deepest_first, deepest_first),
        (by_stage, grouped_forward, grouped_backward),
    ]
    if bound is not None:
        plans.append((Ration(microbatches=bound), deepest_first, deepest_first))
    for ration, forward_order, backward_order in plans:
        policy = Policy(ration=ration, forward_order=forward_order, backward_order=backward_order)
        yield list_schedule(policy, request)


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
    return fastest(_candidates_of_v(request), request)


def _candidates_of_v(request: Request) -> Iterator[Rows]:
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
