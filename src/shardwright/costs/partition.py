"""Cuts a chain into consecutive stages, by an exact solution.

Of all ways to cut n atoms into p intervals, it finds one with the cheapest dearest interval; among those one
with the smallest sum (the fewest bytes sent), then the most even one::

    f_s(j) = min over i < j of max( f_{s-1}(i), cost_s(i, j) )        s stages hold the first j atoms

Each step is one numpy reduction over an n x n table: O(p n^2) in all.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlanError

__all__ = ["split"]

Floats = NDArray[np.float64]

# Weight of evenness against the sum: small enough never to outweigh a byte, large enough for float64.
_EVENNESS = 1e-6


def split(
    num_atoms: int, *, num_stages: int, cost_of_stage: Callable[[int], Floats]
) -> tuple[int, ...] | None:
    """Cuts a chain in intervals, the dearest as cheap as possible.

    >>> ends = np.array([0.0, 1.0, 3.0, 4.0, 8.0])
    >>> cost = np.where(np.tri(5, dtype=bool), np.inf, ends[None, :] - ends[:, None])
    >>> split(4, num_stages=2, cost_of_stage=lambda stage: cost)
    (0, 3, 4)
    """
    if num_stages > num_atoms:
        raise PlanError(
            f"{num_stages} stages were asked for, but the model has only {num_atoms} pieces that can be "
            f"placed apart. Use at most {num_atoms} stages, or split large modules into smaller ones."
        )
    bottleneck = _solve(num_atoms, num_stages, cost_of_stage, np.maximum)
    worst = bottleneck[-1][num_atoms]
    if not np.isfinite(worst):
        return None
    last: tuple[Floats, Floats] | None = None

    def tie_break(stage: int) -> Floats:
        nonlocal last
        cost = cost_of_stage(stage)
        # Most schedules give several stages one table.
        if last is None or last[0] is not cost:
            allowed = np.where(cost <= worst, cost, np.inf)
            last = cost, (allowed + _EVENNESS / worst * allowed * allowed) if worst > 0 else allowed
        return last[1]

    best = _solve(num_atoms, num_stages, tie_break, np.add)
    return _trace_back(num_atoms, best, tie_break)


def _solve(
    num_atoms: int, num_stages: int, cost_of_stage: Callable[[int], Floats], join: np.ufunc
) -> list[Floats]:
    """Row s holds, for each j, the best joined cost of the first j atoms on stages 0 to s."""
    rows = [cost_of_stage(0)[0].copy()]
    rows[0][0] = np.inf
    for stage in range(1, num_stages):
        # Stage s starts at atom s or later and leaves an atom for each stage after it.
        low, high = stage, num_atoms - (num_stages - stage)
        row = np.full(num_atoms + 1, np.inf)
        cost = cost_of_stage(stage)[low : high + 1, low + 1 : high + 2]
        before = rows[-1][low : high + 1]
        row[low + 1 : high + 2] = join(before[:, None], cost).min(axis=0)
        rows.append(row)
    return rows


def _trace_back(
    num_atoms: int, rows: Sequence[Floats], cost_of_stage: Callable[[int], Floats]
) -> tuple[int, ...]:
    cuts = [num_atoms]
    for stage in range(len(rows) - 1, 0, -1):
        end = cuts[-1]
        totals = rows[stage - 1][:end] + cost_of_stage(stage)[:end, end]
        cuts.append(int(np.argmin(totals)))
    return (0, *reversed(cuts))
