"""1F1B: each backward as early as possible, each forward only where a backward has made room.

::

    4 microbatches; rank 0 keeps 3 of them at once, rank 1 two, rank 2 one
    rank 0 | F0 F1 F2 .  .  .  .  B0=== F3 B1=== .  B2=== .  B3===
    rank 1 | .  F0 F1 .  .  B0=== F2 B1=== F3 B2=== .  B3===
    rank 2 | .  .  F0 B0=== F1 B1=== F2 B2=== F3 B3===

Stage s of p keeps at most p - s microbatches: one for each stage that a microbatch still has to pass,
including s itself. The bubble is that of GPipe, which keeps all.

Source: Narayanan et al., PipeDream-Flush, in "Memory-efficient pipeline-parallel DNN training", 2021.
"""

from shardwright.schedule.actions import Action, Kind
from shardwright.schedule.list_scheduler import Policy, Ration, deepest_first, list_schedule
from shardwright.schedule.placement import hops_to_end, is_chain
from shardwright.schedule.request import Request, Rows

__all__ = ["alternate", "one_f_one_b"]


def one_f_one_b(request: Request) -> Rows:
    """The classic rows where rank i runs stage i; else the same rule, p - s being changes of rank + 1."""
    hops = hops_to_end(request.stage_ranks)
    m = request.num_microbatches
    if is_chain(request.stage_ranks):
        most = min(m, request.active_microbatches or m)
        return [
            alternate(
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


def alternate(forwards: list[Action], backwards: list[Action], *, num_ahead: int) -> list[Action]:
    """Some forwards, then backwards and forwards by turns, then the backwards left.

    >>> forwards = [Action(Kind.FORWARD, 0, k) for k in range(3)]
    >>> backwards = [Action(Kind.BACKWARD, 0, k) for k in range(3)]
    >>> " ".join(map(str, alternate(forwards, backwards, num_ahead=2)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    row = forwards[:num_ahead]
    for backward, forward in zip(backwards, forwards[num_ahead:], strict=False):
        row += [backward, forward]
    return row + backwards[len(forwards) - num_ahead :]
