"""ZB-H1: 1F1B with the backward split, and weight gradients deferred to fill the bubble.

::

    5 microbatches, F = I = W = 1
    rank 0 | F0 F1 F2 .  .  B0=== F3 B1=== F4 B2=== B3=== B4===
    rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Stage s of p keeps p - s microbatches between F and I, as in 1F1B, and defers s weight gradients, so that
every rank keeps p, like the first rank of 1F1B. With equal stages and p microbatches or more the bubble is (p
- 1)(tF + tI - tW), where tW is at most tI; a longer W gains nothing more.

Source: Qi et al., "Zero bubble pipeline parallelism", 2023, section 2.3.
"""

from shardwright.schedule.actions import Action, Kind
from shardwright.schedule.halves import join_halves
from shardwright.schedule.list_scheduler import Policy, Ration, deepest_first, list_schedule, oldest_first
from shardwright.schedule.placement import hops_to_end, is_chain, stages_by_rank
from shardwright.schedule.request import Request, Rows

__all__ = ["zb_h1"]


def zb_h1(request: Request) -> Rows:
    """The paper's rows where rank i runs stage i; else the same bounds, p - s being changes of rank + 1."""
    if is_chain(request.stage_ranks):
        rows = [_classic_row(request, stage) for stage in range(request.num_stages)]
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


def _classic_row(request: Request, stage: int) -> list[Action]:
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
