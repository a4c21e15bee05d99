"""Builds a family's schedule for any placement of stages on ranks."""

from collections.abc import Sequence

from shardwright.schedule.actions import StageCost
from shardwright.schedule.families import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from shardwright.schedule.list_scheduler import forward_only as forward_only_rows
from shardwright.schedule.placement import check_kind, check_request
from shardwright.schedule.schedule import Schedule

_FAMILIES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
}


def splits_backward(kind: str) -> bool:
    """Whether a family computes the gradients of inputs (``I``) and of weights (``W``) apart.

    >>> splits_backward("zb_v"), splits_backward("1f1b")
    (True, False)
    """
    check_kind(kind)
    return kind in ("zb_h1", "zb_v")


def build_schedule(
    kind: str,
    *,
    stage_ranks: Sequence[int],
    num_microbatches: int,
    active_microbatches: int | None = None,
    forward_only: bool = False,
    costs: Sequence[StageCost] | None = None,
) -> Schedule:
    """Orders the work of a batch.

    A microbatch passes the stages in order: the forward of a stage needs that of the stage before, its
    backward needs its own forward and the (input) backward of the stage after. The result never deadlocks,
    whatever the placement. On every stage, forwards, backwards and weight gradients each run in the order of
    the microbatches, so that all families add gradients up in the same order. On one rank all families take
    the microbatches one by one.

    Args:
        kind: one of `KINDS`.
        stage_ranks: pipeline rank of each stage; any map, for example that of `place_stages`.
        num_microbatches: parts into which the batch is split.
        active_microbatches: the most that a rank has begun and not wholly done; None for the family's bound.
        forward_only: leave the backward out.
        costs: seconds of each stage, by which the families that are played out choose their order; None for
            forward, ``I`` and ``W`` of one unit each.

    Returns:
        The schedule without transfers, which `lower` adds.

    Raises:
        ScheduleError: the kind is unknown, or a number, the placement or the costs cannot be used.

    >>> print(build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=2))
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F0 1B0 1F1 1B1
    """
    check_kind(kind)
    request = check_request(
        kind,
        stage_ranks=stage_ranks,
        num_microbatches=num_microbatches,
        active_microbatches=active_microbatches,
        costs=costs,
    )
    # One rank waits for nobody: another order would only keep more, and this is how a plain loop goes.
    family = one_f_one_b if request.num_ranks == 1 else _FAMILIES[kind]
    rows = (forward_only_rows if forward_only else family)(request)
    return Schedule(
        kind=kind,
        stage_ranks=request.stage_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(map(tuple, rows)),
    )
