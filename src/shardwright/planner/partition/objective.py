"""The objective of a split: time, memory, or a weighted mix of both.

For speed, the cost of a stage is its time: compute, exposed transfers, and the recomputation without which it
would not fit. Memory is a limit. With a memory weight w, the cost mixes the stage's shares of the whole
model's time and memory, under the same limit::

    (1 - w) * time / time(model) + w * memory / memory(model)

Here the recomputed part is a fraction, the smallest that fits, and so is the offloaded part; the cheaper of
the two counts. `choose_keeping` chooses whole units.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Link
from shardwright.planner.partition.tables import Tables

__all__ = ["Objective", "OffloadPolicy", "RecomputePolicy", "build_objective"]

Floats = NDArray[np.float64]

RecomputePolicy = Literal["auto", "none", "full"]
OffloadPolicy = bool | Literal["auto"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Objective:
    """Costs of stages; made by `build_objective`.

    Attributes:
        tables: sums over all intervals of the chain.
        seconds: compute and exposed transfers of every interval, without recomputation for memory.
        state_bytes: parameters, gradients and optimizer state of every interval.
        memory_weight: share of memory in the cost, 0 to 1.
        limit_bytes: memory of one rank; 0 means no limit.
        recompute: whether units are recomputed where memory requires it, never, or all.
        offload: whether units are offloaded where memory requires it, never, or all.
        horizon: units ahead of their backward that come back.
        host: the way to where they are offloaded to; None where copies take no time.
    """

    tables: Tables
    seconds: Floats
    state_bytes: Floats
    memory_weight: float
    limit_bytes: int
    recompute: RecomputePolicy
    offload: OffloadPolicy = False
    horizon: int = 1
    host: Link | None = None
    _cache: dict[tuple[int, float], Floats] = field(default_factory=dict, init=False, repr=False)

    def cost(self, in_flight: int, slowness: float = 1.0) -> Floats:
        """Cost of every interval as a stage; infinite: impossible."""
        if (in_flight, slowness) not in self._cache:
            tables = self.tables
            saved = in_flight * tables.saved_bytes
            again, overflow = self._relax(
                state=self.state_bytes,
                saved=saved,
                freeable=in_flight * tables.recomputable_bytes,
                leaving=in_flight * tables.leaving_bytes,
                window=tables.window_bytes,
                compute_s=tables.compute_s,
                flying=in_flight,
                work=tables.work_bytes,
                recomputed=tables.recomputed_bytes,
                again_s=tables.recompute_s,
            )
            cost = self._mix((self.seconds + again) * slowness, self.state_bytes + saved)
            possible = np.triu(overflow <= 0, 1)
            self._cache[in_flight, slowness] = np.where(possible, cost, np.inf)
        return self._cache[in_flight, slowness]

    def rank_key(
        self,
        cuts: Sequence[int],
        *,
        ranks: Sequence[int],
        in_flight: Sequence[int],
        slowness: Sequence[float] = (),
    ) -> tuple[float, float, float, float]:
        """The key of a split: bytes missing on the worst rank, on all; dearest rank, dearest stage."""
        at, owner = np.asarray(cuts), np.asarray(ranks)
        pick = (at[:-1], at[1:])
        sums = self._rank_sums(pick, owner, np.asarray(in_flight))
        again, overflow = self._relax(**sums)
        times = np.asarray(slowness) if slowness else np.ones(len(again))
        seconds = self.seconds[pick] * times[owner]
        cost = self._mix(np.bincount(owner, seconds) + again * times, sums["state"] + sums["saved"])
        return float(overflow.max()), float(overflow.sum()), float(cost.max()), float(seconds.max())

    def fits(self, cuts: Sequence[int], *, ranks: Sequence[int], in_flight: Sequence[int]) -> bool:
        """Whether every rank has enough memory without any recomputation but what is asked for."""
        at = np.asarray(cuts)
        sums = self._rank_sums((at[:-1], at[1:]), np.asarray(ranks), np.asarray(in_flight))
        again, overflow = self._relax(**sums)
        return not again.any() and not overflow.any()

    def _rank_sums(
        self, pick: tuple[NDArray[np.int64], NDArray[np.int64]], owner: NDArray[np.int64], flying: Any
    ) -> dict[str, Floats]:
        """The arguments of `_relax` for each rank."""
        tables = self.tables

        def total(values: Floats) -> Floats:
            return np.bincount(owner, values).astype(np.float64)

        def largest(values: Floats) -> Floats:
            found = np.zeros(int(owner.max()) + 1)
            np.maximum.at(found, owner, values)
            return found

        return {
            "state": total(self.state_bytes[pick]),
            "saved": total(flying * tables.saved_bytes[pick]),
            "freeable": total(flying * tables.recomputable_bytes[pick]),
            "leaving": total(flying * tables.leaving_bytes[pick]),
            "window": largest(tables.window_bytes[pick]),
            "compute_s": total(tables.compute_s[pick]),
            "flying": np.maximum(largest(np.asarray(flying, dtype=np.float64)), 1.0),
            "work": largest(tables.work_bytes[pick]),
            "recomputed": largest(tables.recomputed_bytes[pick]),
            "again_s": total(tables.recompute_s[pick]),
        }

    def _relax(
        self,
        *,
        state: Floats,
        saved: Floats,
        freeable: Floats,
        leaving: Floats,
        window: Floats,
        compute_s: Floats,
        flying: Any,
        work: Floats,
        recomputed: Floats,
        again_s: Floats,
    ) -> tuple[Floats, Floats]:
        """Seconds of recomputation or offload that make it fit, and the bytes that are missing even then."""
        again = self._recomputed(
            state=state, saved=saved, freeable=freeable, work=work, recomputed=recomputed, again_s=again_s
        )
        if self.offload is False or not (self.limit_bytes or self.offload is True):
            return again
        full = self.recompute == "full"
        if full:  # their inputs leave
            leaving, saved, work = leaving - freeable, saved - freeable, recomputed
            window = np.minimum(window, leaving)
        several = 2 * self.horizon + 1
        around = np.minimum(several * window, leaving)
        limit = self.limit_bytes or np.inf
        missing = state + saved + work - limit
        to_free = np.full_like(state, np.inf) if self.offload is True else missing + around
        moved = np.where(missing > 0, np.clip(to_free, 0.0, leaving), 0.0)
        if self.offload is True:
            moved = leaving
        copies_s = np.zeros_like(state)
        if self.host is not None:
            copies_s = 2 * moved / flying / self.host.bandwidth_Bps
        occupancy = 0.0 if self.host is None else self.host.occupancy
        away_s = np.maximum(copies_s - compute_s, 0.0) + occupancy * copies_s
        left = np.maximum(np.where(moved > 0, missing + around - leaving, missing), 0.0)
        if self.offload is True:
            return away_s, left
        # Where neither is enough alone, inputs of recomputed units leave, too.
        both = np.maximum(state + saved - leaving + recomputed + around - limit, 0.0)
        better = (left < again[1]) | ((left == again[1]) & (away_s < again[0]))
        seconds, overflow = np.where(better, away_s, again[0]), np.where(better, left, again[1])
        if self.recompute == "auto":
            seconds = np.where((overflow > 0) & (both < overflow), again_s + away_s, seconds)
            overflow = np.minimum(overflow, both)
        return seconds, overflow

    def _recomputed(
        self,
        *,
        state: Floats,
        saved: Floats,
        freeable: Floats,
        work: Floats,
        recomputed: Floats,
        again_s: Floats,
    ) -> tuple[Floats, Floats]:
        """Seconds of recomputation that make it fit, and the bytes that are missing even then."""
        none = np.zeros_like(state)
        if not self.limit_bytes:
            return none, none
        if self.recompute == "full":
            return none, np.maximum(state + saved - freeable + recomputed - self.limit_bytes, 0.0)
        missing = state + saved + work - self.limit_bytes
        if self.recompute == "none":
            return none, np.maximum(missing, 0.0)
        to_free = state + saved + recomputed - self.limit_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            fraction = np.where(freeable > 0, np.clip(to_free / freeable, 0.0, 1.0), 0.0)
        tight = missing > 0
        # Without anything to free, the larger work memory of recomputation does not count either.
        left = np.where(freeable > 0, to_free - freeable, missing)
        return np.where(tight, fraction * again_s, 0.0), np.where(tight, np.maximum(left, 0.0), 0.0)

    def _mix(self, seconds: Floats, held: Floats) -> Floats:
        if self.memory_weight == 0:
            return seconds
        tables = self.tables
        whole_s = max(float(tables.compute_s[0, -1]), 1e-12)
        whole_bytes = max(float(self.state_bytes[0, -1] + tables.saved_bytes[0, -1]), 1.0)
        return (1 - self.memory_weight) * seconds / whole_s + self.memory_weight * held / whole_bytes


def build_objective(
    tables: Tables,
    *,
    link: Link | None = None,
    exposed: float = 1.0,
    memory_weight: float = 0.0,
    limit_bytes: int = 0,
    recompute: RecomputePolicy = "auto",
    offload: OffloadPolicy = False,
    horizon: int = 1,
    host: Link | None = None,
    optimizer_factor: float = 2.0,
) -> Objective:
    """Makes the costs of all stages."""
    seconds = tables.compute_s
    if recompute == "full":
        seconds = seconds + tables.recompute_s
    if link is not None and exposed > 0:
        for sent in (
            tables.receive_bytes,
            tables.send_bytes,
            tables.receive_gradient_bytes,
            tables.send_gradient_bytes,
        ):
            seconds = seconds + exposed * (link.latency_s * (sent > 0) + sent / link.bandwidth_Bps)
    return Objective(
        tables=tables,
        seconds=seconds,
        state_bytes=tables.parameter_bytes
        + tables.gradient_bytes
        + optimizer_factor * tables.optimized_bytes,
        memory_weight=memory_weight,
        limit_bytes=limit_bytes,
        recompute=recompute,
        offload=offload,
        horizon=horizon,
        host=host,
    )
