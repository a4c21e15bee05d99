"""The forward-only schedule, for evaluation and inference.

::

    3 microbatches, stages on ranks (0, 1, 0)
    rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2F2
    rank 1 | .   1F0 1F1 .   .   1F2

Deeper stages go first, so that results leave early and little waits in between.
"""

from shardwright.schedule.list_scheduler import Policy, Ration, deepest_first, list_schedule
from shardwright.schedule.request import Request, Rows

__all__ = ["forward_only"]


def forward_only(request: Request) -> Rows:
    """The forwards alone, in an order that runs on any placement."""
    policy = Policy(
        ration=Ration(microbatches=request.active_microbatches),
        forward_order=deepest_first,
        backward_order=deepest_first,
    )
    return list_schedule(policy, request, forward_only=True)
