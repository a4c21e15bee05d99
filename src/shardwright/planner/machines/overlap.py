"""Computes the part of the replicas' communication that hides behind a rank's compute.

::

    last backward   │ block 5 │ block 4 │ block 3 │
    sums                      ░░░░░ ░░░░░ ░░░░░ ░░░░  <- exposed: what is left when the backward has ended

Gradients are reduced bucket by bucket, each as soon as the last backward has filled it; rows of other hosts
are gathered in the order in which the first forward uses them. A core that copies messages computes nothing
meanwhile: that share of the hidden time is exposed too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.bucket_size import size_of_buckets
from shardwright.planner.partition.layout import Layout

__all__ = ["Moment", "Moments", "exposed_after", "exposed_before", "moments_of"]

_MOST_BUCKET_BYTES = 25 * 2**20  # as users find it set


@dataclass(frozen=True, slots=True)
class Moment:
    """A tensor, with the computing that is on its far side.

    Attributes:
        seconds: of the last backward that are left when its gradient is complete, or of the first forward
            before its rows are used.
    """

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of the trained parameters of a rank.

    Attributes:
        gradients: when they are complete; of all.
        rows: when they are used; of those that replicas share.
    """

    gradients: list[Moment]
    rows: list[Moment]

    def slower(self, factor: float) -> "Moments":
        """The same, where computing takes so many times as long."""
        if factor == 1:
            return self
        gradients, rows = (
            [Moment(moment.seconds * factor, moment.num_bytes) for moment in moments]
            for moments in (self.gradients, self.rows)
        )
        return Moments(gradients, rows)

    @property
    def window_s(self) -> float:
        """Seconds of the backward for which some gradients are there already."""
        return max((moment.seconds for moment in self.gradients), default=0.0)


def moments_of(layout: Layout, *, splits: bool) -> list[Moments]:
    """For each rank, its trained parameters beside what it computes.

    Of several stages of a rank, the lowest has the last backward and the first forward: what others use comes
    long before, and after.
    """
    chain = layout.chain
    slowness = np.asarray(layout.slowness or [1.0] * layout.num_ranks)
    times = slowness[list(layout.ranks)][layout.stage_of_call]
    again_s = np.where(layout.recompute, chain.column("recompute_s"), 0.0)
    forward_s = _until(chain.column("forward_s") * times)
    backward_s = _until(
        (chain.column("weight_s") if splits else chain.column("backward_s") + again_s) * times
    )
    rank_of = np.asarray(layout.ranks)[layout.stage_of_call].tolist()
    found = [Moments([], []) for _ in range(layout.num_ranks)]
    for use, ranks in layout.holders():
        for rank in ranks if use.trained else ():
            lowest = min(layout.stages_of(rank))
            start, end = layout.cuts[lowest], layout.cuts[lowest + 1]
            first = min(end, next(call for call in use.calls if rank_of[call] == rank))
            found[rank].gradients.append(Moment(backward_s[first] - backward_s[start], use.num_bytes))
            if use.shared is not None and len(ranks) == 1:
                found[rank].rows.append(Moment(forward_s[first] - forward_s[start], use.num_bytes))
    return found


def exposed_after(moments: Sequence[Moment], total_s: float, *, occupancy: float) -> float:
    """Seconds by which sums of gradients make a step longer."""
    num_bytes = sum(moment.num_bytes for moment in moments)
    if not num_bytes or total_s <= 0:
        return 0.0
    size = size_of_buckets(num_bytes, most=_MOST_BUCKET_BYTES)
    end_s = float("-inf")  # counted from the end of the backward
    bucket = 0
    order = sorted(moments, key=lambda moment: -moment.seconds)
    for moment, following in zip(order, [*order[1:], None], strict=True):
        bucket += moment.num_bytes
        if following is None or bucket + following.num_bytes > size:
            end_s = max(end_s, -moment.seconds) + total_s * bucket / num_bytes
            bucket = 0
    return _with_copies(max(0.0, end_s), total_s, occupancy)


def exposed_before(moments: Sequence[Moment], total_s: float, *, occupancy: float) -> float:
    """Seconds by which gathering rows in the order of their use makes a step longer."""
    num_bytes = sum(moment.num_bytes for moment in moments)
    if not num_bytes or total_s <= 0:
        return 0.0
    arrived, late_s = 0, 0.0
    for moment in sorted(moments, key=lambda moment: moment.seconds):
        arrived += moment.num_bytes
        late_s = max(late_s, total_s * arrived / num_bytes - moment.seconds)
    return _with_copies(late_s, total_s, occupancy)


def _until(seconds: NDArray[np.float64]) -> list[float]:
    """Sums of what comes before each call, and of all."""
    sums: list[float] = np.concatenate(([0.0], np.cumsum(seconds))).tolist()
    return sums


def _with_copies(exposed_s: float, total_s: float, occupancy: float) -> float:
    exposed_s = min(exposed_s, total_s)
    return exposed_s + occupancy * (total_s - exposed_s)
