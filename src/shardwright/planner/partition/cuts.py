"""Cuts that no recursion finds: several stages per rank, and cuts set by hand.

With several stages per rank, the sum over a rank's stages counts: `improve` starts from the solution of
`costs.partition.split` and moves one cut at a time while that helps.
"""

from collections.abc import Callable, Sequence

from shardwright.errors import PlanError

__all__ = ["improve", "manual_stages"]

# So many cuts may also move in groups.
_FEW_CUTS = 16


def improve(
    cuts: Sequence[int],
    *,
    key: Callable[[tuple[int, ...]], tuple[float, ...]],
    max_passes: int = 20,
) -> tuple[int, ...]:
    """Moves cuts while the key falls: one at a time, or, of few, up to three neighbours together.

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
