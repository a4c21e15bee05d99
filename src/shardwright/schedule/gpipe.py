"""GPipe: all forwards, then all backwards.

::

    4 microbatches
    rank 0 | F0 F1 F2 F3 .  .  .  B0=== B1=== B2=== B3===
    rank 1 | .  F0 F1 F2 F3 B0=== B1=== B2=== B3===

It keeps all microbatches at once. With fewer active microbatches it runs in waves of that many. Backwards run
from the first microbatch to the last, so that gradients are summed in the same order as in the other
families.

Source: Huang et al., GPipe, 2019.
"""

from shardwright.schedule.actions import Action, Kind
from shardwright.schedule.placement import stages_by_rank
from shardwright.schedule.request import Request, Rows

__all__ = ["gpipe"]


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
