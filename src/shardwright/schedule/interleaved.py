"""Interleaved 1F1B: several stages a rank, so that the pipeline fills in a fraction of the time.

::

    4 microbatches, 2 ranks, stages 0 and 2 on rank 0, 1 and 3 on rank 1; microbatches go in groups of 2
    rank 0 | 0F0 0F1 2F0 2F1 .   0F2 2B0==== 0F3 2B1==== 2F2 0B0==== 2F3 0B1==== ...
    rank 1 | .   1F0 1F1 3F0 3B0==== 3F1 3B1==== 1F2 1B0==== 1F3 1B1==== ...

With v stages on each of p ranks the bubble is v times smaller than that of 1F1B; transfers are v times as
many.

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021, section 2.2.
"""

from shardwright.schedule.actions import Action, Kind
from shardwright.schedule.list_scheduler import Policy, Ration, list_schedule
from shardwright.schedule.one_f_one_b import alternate, one_f_one_b
from shardwright.schedule.placement import hops_to_end, is_chain, is_round_robin, stages_by_rank
from shardwright.schedule.request import Request, Rows

__all__ = ["interleaved"]


def interleaved(request: Request) -> Rows:
    """The classic rows where they exist, else the same order played out under the same bounds.

    The classic rows need ranks that take turns and whole groups of p microbatches. With a broken last group
    their fixed number of forwards ahead can deadlock, so there the list scheduler decides.
    """
    if is_chain(request.stage_ranks):
        return one_f_one_b(request)
    if is_round_robin(request.stage_ranks) and request.num_microbatches % request.num_ranks == 0:
        rows = [_classic_row(request, rank) for rank in range(request.num_ranks)]
        bound = request.active_microbatches
        if bound is None or max(map(_most_microbatches, rows)) <= bound:
            return rows
    return _played_out(request)


def _classic_row(request: Request, rank: int) -> list[Action]:
    p, m = request.num_ranks, request.num_microbatches
    v = request.num_stages // p
    forwards, backwards = [], []
    for first in range(0, m, p):
        for chunk in range(v):
            for k in range(first, first + p):
                forwards.append(Action(Kind.FORWARD, chunk * p + rank, k))
                backwards.append(Action(Kind.BACKWARD, (v - 1 - chunk) * p + rank, k))
    return alternate(forwards, backwards, num_ahead=min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1))


def _most_microbatches(row: list[Action]) -> int:
    """The largest number of microbatches under way on a rank."""
    kept: dict[int, int] = {}
    most = 0
    for action in row:
        change = 1 if action.kind is Kind.FORWARD else -1
        kept[action.microbatch] = kept.get(action.microbatch, 0) + change
        if not kept[action.microbatch]:
            del kept[action.microbatch]
        most = max(most, len(kept))
    return most


def _played_out(request: Request) -> Rows:
    p = request.num_ranks
    stages = stages_by_rank(request.stage_ranks)
    hops = hops_to_end(request.stage_ranks)
    chunk = {stage: index for row in stages for index, stage in enumerate(row)}
    group = min(p, request.active_microbatches or p)
    policy = Policy(
        ration=Ration(
            rank=[2 * hops[row[-1]] + (len(row) - 1) * p + 1 for row in stages],
            microbatches=request.active_microbatches,
        ),
        forward_order=lambda stage, k: (k // group, chunk[stage], k),
        backward_order=lambda stage, k: (k // group, -chunk[stage], k),
    )
    rows, _ = list_schedule(
        policy,
        stage_ranks=request.stage_ranks,
        num_microbatches=request.num_microbatches,
        costs=request.costs,
    )
    return rows
