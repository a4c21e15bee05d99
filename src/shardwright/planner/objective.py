"""The objective of a split, time, memory or a mix of both, for all possible stages of a chain at once.

Its sums are numpy tables. ``table[i, j]`` belongs to the stage with atoms i, i+1, ..., j-1; entries with j <=
i mean nothing. Additive costs need only prefix sums. Costs that count distinct things (a value read by two
units of a stage is received once) are written as rectangles and integrated once::

            j                 a value made by atom a and read by atoms c and d
        i ┌───────────────    is received by stage (i, j] if
     a+1  │    ┌──────────      a < i <= c < j     its first reader in the stage is c
     ...  │    │ c < j        or c < i <= d < j    its first reader in the stage is d
      c   │    └──────────

For speed, the cost of a stage is its time: compute, exposed transfers, and the recomputation without which it
would not fit. Memory is a limit. With a memory weight w, the cost mixes the stage's shares of the whole
model's time and memory, under the same limit::

    (1 - w) * time / time(model) + w * memory / memory(model)

Here the recomputed part is a fraction, the smallest that fits, and so is the offloaded part; the cheaper of
the two counts. `choose_keeping` chooses whole units.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Link
from shardwright.planner.chain import Chain

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Costs of every possible stage of a chain, for one microbatch.

    Attributes:
        num_atoms: n; each table has n + 1 rows and columns.
        compute_s: seconds of the forward and the backward, recomputation not counted.
        saved_bytes: bytes kept for the backward, with the values that it sends: backward starts from them.
        recomputable_bytes: the part of them that recomputation sets free.
        leaving_bytes: the part of them that units can offload.
        window_bytes: what the unit that offloads most keeps.
        recomputed_bytes: memory that its largest unit needs while it is recomputed.
        optimized_bytes: those that an optimizer keeps state for.
        send_bytes: values that it sends, each once however many stages read it.
    """

    num_atoms: int
    compute_s: Floats
    recompute_s: Floats
    saved_bytes: Floats
    recomputable_bytes: Floats
    leaving_bytes: Floats
    window_bytes: Floats
    work_bytes: Floats
    recomputed_bytes: Floats
    parameter_bytes: Floats
    gradient_bytes: Floats
    optimized_bytes: Floats
    receive_bytes: Floats
    send_bytes: Floats
    receive_gradient_bytes: Floats
    send_gradient_bytes: Floats


def build_tables(chain: Chain) -> _Tables:
    """The tables of a chain; for 1000 atoms about a quarter of a second."""
    n = chain.num_atoms
    starts = np.asarray(chain.starts)
    atom = chain.atom_of_call

    def sums(per_call: Floats) -> Floats:
        prefix = np.concatenate(([0.0], np.cumsum(per_call)))[starts]
        table: Floats = np.subtract.outer(-prefix, -prefix)
        return table

    recomputable = chain.column("saved_bytes") - chain.column("kept_bytes")
    parameters = []
    for use in chain.parameters:
        atoms = _atoms(atom, use.calls)
        parameters.append(([-1, *atoms], use.state(may_be_shared=len(atoms) == 1)))
    sources = [int(atom[flow.source]) for flow in chain.flows]
    forward = [
        ([source, *_atoms(atom, flow.targets, after=source)], float(flow.num_bytes))
        for source, flow in zip(sources, chain.flows, strict=True)
    ]
    gradients = [
        ([source, *_atoms(atom, flow.gradient_targets, after=source)], float(flow.gradient_bytes))
        for source, flow in zip(sources, chain.flows, strict=True)
    ]
    sent_with_gradient = _leaving(n, gradients)
    return _Tables(
        num_atoms=n,
        compute_s=sums(chain.column("forward_s")) + sums(chain.column("backward_s")),
        recompute_s=sums(chain.column("recompute_s")),
        saved_bytes=sums(chain.column("saved_bytes") + chain.column("glue_bytes")) + sent_with_gradient,
        recomputable_bytes=sums(recomputable),
        leaving_bytes=sums(chain.column("saved_bytes")),
        window_bytes=_maxima(chain.column("saved_bytes"), starts),
        work_bytes=_maxima(chain.column("work_bytes"), starts),
        recomputed_bytes=_maxima(recomputable + chain.column("work_bytes"), starts),
        parameter_bytes=_entering(n, [(at, float(state.parameters)) for at, state in parameters])
        + np.minimum(
            _entering(n, [(at, float(state.gathered)) for at, state in parameters]), chain.most_gathered
        ),
        gradient_bytes=_entering(n, [(at, float(state.gradients)) for at, state in parameters]),
        optimized_bytes=_entering(n, [(at, float(state.optimized)) for at, state in parameters]),
        receive_bytes=_entering(n, forward),
        send_bytes=_leaving(n, forward),
        receive_gradient_bytes=sent_with_gradient,
        send_gradient_bytes=_entering(n, gradients),
    )


def _atoms(atom: NDArray[np.int64], calls: Sequence[int], after: int = -1) -> list[int]:
    return [a for a in dict.fromkeys(int(atom[call]) for call in calls) if a > after]


def _entering(n: int, rows: Sequence[tuple[list[int], float]]) -> Floats:
    """For each interval, the bytes of what is made before it and read inside."""
    corners: list[tuple[int, int, float]] = []
    for at, size in rows:
        for before, reader in pairwise(at):
            corners += [(before + 1, reader + 1, size), (reader + 1, reader + 1, -size)]
    return _integrate(n, corners)


def _leaving(n: int, rows: Sequence[tuple[list[int], float]]) -> Floats:
    """For each interval, the bytes of what is made inside and read after it."""
    corners: list[tuple[int, int, float]] = []
    for at, size in rows:
        source, last = at[0], at[-1]
        if last > source:
            corners += [(0, source + 1, size), (source + 1, source + 1, -size)]
            corners += [(0, last + 1, -size), (source + 1, last + 1, size)]
    return _integrate(n, corners)


def _integrate(n: int, corners: Sequence[tuple[int, int, float]]) -> Floats:
    table = np.zeros((n + 2, n + 2))
    if corners:
        rows, columns, sizes = (np.array(column) for column in zip(*corners, strict=True))
        np.add.at(table, (rows.astype(np.int64), columns.astype(np.int64)), sizes)
        np.cumsum(table, axis=0, out=table)
        np.cumsum(table, axis=1, out=table)
    return table[: n + 1, : n + 1]


def _maxima(per_call: Floats, starts: NDArray[np.int64]) -> Floats:
    per_atom = np.maximum.reduceat(per_call, starts[:-1])
    n = len(per_atom)
    table = np.zeros((n + 1, n + 1))
    table[:n, 1:] = np.triu(np.broadcast_to(per_atom, (n, n)))
    np.maximum.accumulate(table, axis=1, out=table)
    return table


RecomputePolicy = Literal["auto", "none", "full"]
OffloadPolicy = bool | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """The demands on every option.

    Attributes:
        limit_bytes: memory of one rank; 0 means no limit.
        memory_weight: share of memory in what is balanced.
        recompute: whether units are recomputed where memory requires it, never, or all.
        offload: whether units are offloaded where memory requires it, never, or all.
        horizon: units ahead of their backward that come back.
        active_microbatches: bound on microbatches in flight; None for the schedule's own.
        optimizer_factor: bytes of optimizer state for each byte of a trained parameter.
    """

    limit_bytes: int = 0
    memory_weight: float = 0.0
    recompute: RecomputePolicy = "auto"
    offload: OffloadPolicy = False
    horizon: int = 1
    active_microbatches: int | None = None
    optimizer_factor: float = 2.0


class _Sums(NamedTuple):
    """What counts of stages, or of ranks: states, what is kept, may be freed, may leave."""

    state: Floats
    saved: Floats
    freeable: Floats
    leaving: Floats
    window: Floats
    compute_s: Floats
    flying: Any
    work: Floats
    recomputed: Floats
    again_s: Floats


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Objective:
    """Costs of stages; made by `build_objective`.

    Attributes:
        tables: sums over all intervals of the chain.
        seconds: compute and exposed transfers of every interval, without recomputation for memory.
        state_bytes: parameters, gradients and optimizer state of every interval.
        host: the way to where they are offloaded to; None where copies take no time.
    """

    tables: _Tables
    seconds: Floats
    state_bytes: Floats
    demands: Demands
    host: Link | None = None
    _cache: dict[tuple[int, float], Floats] = field(default_factory=dict, init=False, repr=False)

    def cost(self, in_flight: int, slowness: float = 1.0) -> Floats:
        """Cost of every interval as a stage; infinite: impossible."""
        if (in_flight, slowness) not in self._cache:
            tables = self.tables
            saved = in_flight * tables.saved_bytes
            again, overflow = self._relax(self._sums(in_flight, lambda each: each, lambda each: each))
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
        again, overflow = self._relax(sums)
        times = np.asarray(slowness) if slowness else np.ones(len(again))
        seconds = self.seconds[pick] * times[owner]
        cost = self._mix(np.bincount(owner, seconds) + again * times, sums.state + sums.saved)
        return float(overflow.max()), float(overflow.sum()), float(cost.max()), float(seconds.max())

    def fits(self, cuts: Sequence[int], *, ranks: Sequence[int], in_flight: Sequence[int]) -> bool:
        """Whether every rank has enough memory without any recomputation but what is asked for."""
        at = np.asarray(cuts)
        sums = self._rank_sums((at[:-1], at[1:]), np.asarray(ranks), np.asarray(in_flight))
        again, overflow = self._relax(sums)
        return not again.any() and not overflow.any()

    def _rank_sums(
        self, pick: tuple[NDArray[np.int64], NDArray[np.int64]], owner: NDArray[np.int64], flying: Any
    ) -> _Sums:
        def largest(values: Floats) -> Floats:
            found = np.zeros(int(owner.max()) + 1)
            np.maximum.at(found, owner, values)
            return found

        sums = self._sums(
            flying,
            lambda values: np.bincount(owner, values).astype(np.float64),
            largest,
            pick=pick,
        )
        return sums._replace(flying=np.maximum(largest(np.asarray(flying, dtype=np.float64)), 1.0))

    def _sums(
        self,
        flying: Any,
        total: Callable[[Floats], Floats],
        largest: Callable[[Floats], Floats],
        pick: Any = ...,
    ) -> _Sums:
        tables = self.tables
        return _Sums(
            state=total(self.state_bytes[pick]),
            saved=total(flying * tables.saved_bytes[pick]),
            freeable=total(flying * tables.recomputable_bytes[pick]),
            leaving=total(flying * tables.leaving_bytes[pick]),
            window=largest(tables.window_bytes[pick]),
            compute_s=total(tables.compute_s[pick]),
            flying=flying,
            work=largest(tables.work_bytes[pick]),
            recomputed=largest(tables.recomputed_bytes[pick]),
            again_s=total(tables.recompute_s[pick]),
        )

    def _relax(self, s: _Sums) -> tuple[Floats, Floats]:
        """Seconds of recomputation or offload that make it fit, and the bytes that are missing even then."""
        again, demands = self._recomputed(s), self.demands
        is_whole = demands.offload is True
        if demands.offload is False or not (demands.limit_bytes or is_whole):
            return again
        leaving, saved, work, window = s.leaving, s.saved, s.work, s.window
        if demands.recompute == "full":  # their inputs leave
            leaving, saved, work = leaving - s.freeable, saved - s.freeable, s.recomputed
            window = np.minimum(window, leaving)
        around = np.minimum((2 * demands.horizon + 1) * window, leaving)
        limit = demands.limit_bytes or np.inf
        missing = s.state + saved + work - limit
        some = np.where(missing > 0, np.clip(missing + around, 0.0, leaving), 0.0)
        moved = leaving if is_whole else some
        copies_s = np.zeros_like(s.state)
        if self.host is not None:
            copies_s = 2 * moved / s.flying / self.host.bandwidth_Bps
        occupancy = 0.0 if self.host is None else self.host.occupancy
        away_s = np.maximum(copies_s - s.compute_s, 0.0) + occupancy * copies_s
        left = np.maximum(np.where(moved > 0, missing + around - leaving, missing), 0.0)
        if is_whole:
            return away_s, left
        # Where neither is enough alone, inputs of recomputed units leave, too.
        both = np.maximum(s.state + saved - leaving + s.recomputed + around - limit, 0.0)
        better = (left < again[1]) | ((left == again[1]) & (away_s < again[0]))
        seconds, overflow = np.where(better, away_s, again[0]), np.where(better, left, again[1])
        if demands.recompute == "auto":
            seconds = np.where((overflow > 0) & (both < overflow), s.again_s + away_s, seconds)
            overflow = np.minimum(overflow, both)
        return seconds, overflow

    def _recomputed(self, s: _Sums) -> tuple[Floats, Floats]:
        """Seconds of recomputation that make it fit, and the bytes that are missing even then."""
        none, limit = np.zeros_like(s.state), self.demands.limit_bytes
        if not limit:
            return none, none
        if self.demands.recompute == "full":
            return none, np.maximum(s.state + s.saved - s.freeable + s.recomputed - limit, 0.0)
        missing = s.state + s.saved + s.work - limit
        if self.demands.recompute == "none":
            return none, np.maximum(missing, 0.0)
        to_free = s.state + s.saved + s.recomputed - limit
        with np.errstate(divide="ignore", invalid="ignore"):
            fraction = np.where(s.freeable > 0, np.clip(to_free / s.freeable, 0.0, 1.0), 0.0)
        tight = missing > 0
        # Without anything to free, the larger work memory of recomputation does not count either.
        left = np.where(s.freeable > 0, to_free - s.freeable, missing)
        return np.where(tight, fraction * s.again_s, 0.0), np.where(tight, np.maximum(left, 0.0), 0.0)

    def _mix(self, seconds: Floats, held: Floats) -> Floats:
        weight, tables = self.demands.memory_weight, self.tables
        if weight == 0:
            return seconds
        whole_s = max(float(tables.compute_s[0, -1]), 1e-12)
        whole_bytes = max(float(self.state_bytes[0, -1] + tables.saved_bytes[0, -1]), 1.0)
        return (1 - weight) * seconds / whole_s + weight * held / whole_bytes


def build_objective(
    tables: _Tables,
    demands: Demands,
    *,
    link: Link | None = None,
    exposed: float = 1.0,
    host: Link | None = None,
) -> Objective:
    seconds = tables.compute_s
    if demands.recompute == "full":
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
        + demands.optimizer_factor * tables.optimized_bytes,
        demands=demands,
        host=host,
    )
