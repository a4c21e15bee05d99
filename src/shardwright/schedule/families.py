"""The families with whole backwards: GPipe, 1F1B, interleaved 1F1B.

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
    list_schedule,
    most_in_flight,
)
from shardwright.schedule.placement import (
    Request,
    Rows,
    hops_to_end,
    is_chain,
    is_round_robin,
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
    return fastest(_candidates(request), request)


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


def _candidates(request: Request) -> Iterator[Rows]:
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
