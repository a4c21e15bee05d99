"""Where to cut the chain.

`split` solves the linear partition exactly: of all ways to cut n atoms in p intervals, one whose dearest
interval is as cheap as possible, and among those one with the smallest sum (the fewest bytes sent), then the
most even one::

    f_s(j) = min over i < j of max( f_{s-1}(i), cost_s(i, j) )        s stages hold the first j atoms

Each step is one numpy reduction over an n x n table: O(p n^2) in all.

With several stages on each rank, what counts is the sum over a rank's stages, which has no such recursion:
`improve` starts from the solution of `split` and moves one cut at a time while that helps.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlanError

__all__ = ["improve", "manual_stages", "split"]

Floats = NDArray[np.float64]

# Weight of evenness against the sum: small enough never to outweigh a byte, large enough for float64.
_EVENNESS = 1e-6

# So many cuts may also move in groups.
_FEW_CUTS = 16


def split(
    num_atoms: int, *, num_stages: int, cost_of_stage: Callable[[int], Floats]
) -> tuple[int, ...] | None:
    """Cuts a chain in intervals, the dearest as cheap as possible.

    Args:
        num_atoms: n.
        num_stages: number of intervals; none is empty.
        cost_of_stage: for each stage, its (n + 1) x (n + 1) table of costs: entry (i, j) is the interval of
            atoms i to j - 1; infinite where it may not be, and for j <= i.

    Returns:
        The cuts, from 0 to n; None if no way is allowed.

    Raises:
        PlanError: there are fewer atoms than stages.

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


def improve(
    cuts: Sequence[int],
    *,
    key: Callable[[tuple[int, ...]], tuple[float, ...]],
    max_passes: int = 20,
) -> tuple[int, ...]:
    """Moves cuts while the key falls: one at a time, or, of few, up to three neighbours together.

    Args:
        cuts: where to start.
        key: what to make small; compared as tuples.
        max_passes: rounds over all cuts at most.

    >>> improve((0, 1, 6), key=lambda cuts: (abs(cuts[1] - 3),))
    (0, 3, 6)
    """
    best = tuple(cuts)
    best_key = key(best)
    num_inner = len(best) - 2
    lengths = range(1, min(num_inner, 3 if num_inner <= _FEW_CUTS else 1) + 1)
    runs = [(at, at + n) for n in lengths for at in range(1, num_inner + 2 - n)]
    for _ in range(max_passes):
        before = best
        for first, after in runs:
            for step in (-1, 1):
                while (trial := _moved(best, first, after, step)) is not None:
                    trial_key = key(trial)
                    if trial_key >= best_key:
                        break
                    best, best_key = trial, trial_key
        if best == before:
            break
    return best


def _moved(cuts: tuple[int, ...], first: int, after: int, step: int) -> tuple[int, ...] | None:
    """The cuts from `first` up to `after` moved by `step`; None where that empties a stage."""
    if not cuts[first - 1] < cuts[first] + step or not cuts[after - 1] + step < cuts[after]:
        return None
    return (*cuts[:first], *(cut + step for cut in cuts[first:after]), *cuts[after:])


def manual_stages(ranks: Sequence[int], *, num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Stages of a placement by hand: runs of consecutive calls on one rank.

    Args:
        ranks: pipeline rank of each call.
        num_ranks: pipeline ranks.

    Returns:
        The cuts, and the rank of each stage.

    Raises:
        PlanError: a rank does not exist, or gets nothing to do.

    >>> manual_stages([0, 0, 1, 0], num_ranks=2)
    ((0, 2, 3, 4), (0, 1, 0))
    """
    wrong = sorted(set(ranks) - set(range(num_ranks)))
    if wrong:
        raise PlanError(
            f"a module is placed on partition {wrong[0]}, but there are {num_ranks}: "
            f"partitions run from 0 to {num_ranks - 1}."
        )
    idle = sorted(set(range(num_ranks)) - set(ranks))
    if idle:
        raise PlanError(
            f"partition {idle[0]} gets no module. Create one inside sw.partition({idle[0]}), "
            f"or set pipeline_parallel_degree to {num_ranks - len(idle)}."
        )
    starts = [at for at, rank in enumerate(ranks) if at == 0 or ranks[at - 1] != rank]
    return (*starts, len(ranks)), tuple(ranks[start] for start in starts)
