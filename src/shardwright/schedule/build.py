"""Builds a family's schedule for any placement of stages on ranks.

The cost of schedules by formula, for equal stages and free transfers.

For p ranks, m microbatches (p or more), v stages a rank, and the seconds tF, tI, tW of one microbatch on all
stages of a rank (tB = tI + tW):

=================  ==========================  ==================================================
schedule           bubble, seconds             activations of stages kept by rank r
=================  ==========================  ==================================================
gpipe              (p - 1)(tF + tB)            m v, for p > 1
1f1b               (p - 1)(tF + tB)            min(m, p - r)
interleaved_1f1b   (p - 1)(tF + tB) / v        min(m v, 2 (p - r - 1) + (v - 1) g + 1), p <= g < 2p
zb_h1              (p - 1)(tF + tI - tW)       min(m, p), for tW <= tI
zb_v               (p - 1) tF / 2              min(2 m, 2 p), for tF = tI = tW and m >= 2p - 1
=================  ==========================  ==================================================

The bubble is the time of a step beyond m (tF + tB). For ``zb_v`` papers write zero, since every rank is busy
from its first action to its last; (p - 1) tF / 2 is the wait of the last rank before its first action. g is
the size of the largest group of microbatches: p, if p divides m. One rank alone takes them one by one, in
GPipe, too.

Sources: the papers named in the files of the families.
"""

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


def bubble_seconds(
    kind: str,
    *,
    num_ranks: int,
    forward_s: float,
    backward_s: float,
    weight_s: float = 0.0,
    stages_per_rank: int = 1,
) -> float:
    """Seconds of a step in which a rank is idle, by the table above.

    Args:
        kind: one of `KINDS`.
        num_ranks: pipeline ranks.
        forward_s: seconds of one microbatch's forward on all stages of a rank.
        backward_s: seconds of its whole backward there.
        weight_s: the part of `backward_s` that can be put off.
        stages_per_rank: counts for ``interleaved_1f1b`` only.

    >>> bubble_seconds("1f1b", num_ranks=4, forward_s=1.0, backward_s=2.0)
    9.0
    >>> bubble_seconds("zb_h1", num_ranks=4, forward_s=1.0, backward_s=2.0, weight_s=1.0)
    3.0
    """
    check_kind(kind)
    hops = num_ranks - 1
    if kind == "zb_v":
        return hops * forward_s / 2
    if kind == "zb_h1":
        input_s = backward_s - weight_s
        return hops * (forward_s + input_s - min(weight_s, input_s))
    chunks = stages_per_rank if kind == "interleaved_1f1b" else 1
    return hops * (forward_s + backward_s) / chunks


def peak_activations(
    kind: str,
    *,
    num_ranks: int,
    rank: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
) -> int:
    """Activations of stages that a rank keeps at most, from ``F`` to ``B`` or ``W``, by the table above.

    >>> [peak_activations("1f1b", num_ranks=3, rank=rank, num_microbatches=8) for rank in range(3)]
    [3, 2, 1]
    """
    check_kind(kind)
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if kind == "gpipe":
        return m * v if p > 1 else v
    if kind == "zb_h1":
        return min(m, p)
    if kind == "zb_v":
        return min(2 * m, 2 * p)
    if kind == "1f1b" or v == 1:
        return min(m, p - rank)
    group = -(-m // max(1, m // p))
    return min(m * v, 2 * (p - rank - 1) + (v - 1) * group + 1)
