"""Cuts that no recursion finds: for several stages per rank, set by hand, on boundaries of blocks.

With several stages per rank, the sum over a rank's stages counts: `improve` starts from the solution of
`costs.chain.split` and moves one cut at a time while that helps.

`on_boundaries` keeps cuts where people can name them. A block is a module with a number for a name, such as
``layers.2``; its parts are called one after the other::

    embed | layers.0.attention  layers.0.mlp | layers.1.attention  layers.1.mlp | head
          0                   1              0                   1              0       nesting of each cut
"""

import itertools
from collections.abc import Callable, Sequence

from shardwright.errors import PlanError

_MOST_PASSES = 20
_FEW_CUTS = 16  # so many may also move in groups


def improve(cuts: Sequence[int], *, key: Callable[[tuple[int, ...]], tuple[float, ...]]) -> tuple[int, ...]:
    """Moves cuts while the key falls: one at a time, or, of few, up to three neighbours together.

    >>> improve((0, 1, 6), key=lambda cuts: (abs(cuts[1] - 3),))
    (0, 3, 6)
    """
    best = tuple(cuts)
    best_key = key(best)
    num_inner = len(best) - 2
    lengths = range(1, min(num_inner, 3 if num_inner <= _FEW_CUTS else 1) + 1)
    runs = [(at, at + n) for n in lengths for at in range(1, num_inner + 2 - n)]
    for _ in range(_MOST_PASSES):
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


def nesting_of(labels: Sequence[str], cut: int) -> int:
    """The number of blocks that a cut before a call runs through.

    >>> labels = ["embed", "layers.0.attention", "layers.0.mlp", "layers.1.attention"]
    >>> [nesting_of(labels, cut) for cut in (1, 2, 3)]
    [0, 1, 0]
    """
    before, behind = (labels[at].partition("#")[0].split(".") for at in (cut - 1, cut))
    nesting = 0
    for ours, theirs in zip(before[:-1], behind[:-1], strict=False):
        if ours != theirs:
            break
        nesting += ours.isdecimal()
    return nesting


def block_of(labels: Sequence[str], call: int, *, ends: bool) -> str:
    """What a stage begins or ends with: the outermost block that begins or ends there too, or else the call.

    >>> labels = ["embed", "layers.0.attention", "layers.0.mlp", "layers.1.attention"]
    >>> block_of(labels, 1, ends=False), block_of(labels, 1, ends=True)
    ('layers.0', 'layers.0.attention')
    """
    cut = call + ends
    parts = labels[call].partition("#")[0].split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    nesting = nesting_of(labels, cut) if 0 < cut < len(labels) else 0
    return ".".join(parts[: numbers[nesting] + 1]) if nesting < len(numbers) else labels[call]


def on_boundaries(
    cuts: Sequence[int], labels: Sequence[str], seconds: Sequence[float], allowed: Sequence[int]
) -> tuple[int, ...] | None:
    """Moves each cut that runs through a block to the nearest boundary, by the seconds between them.

    >>> labels = ["embed", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"]
    >>> on_boundaries([0, 2, 5], labels, [1, 4, 3, 4, 3], allowed=range(6))
    (0, 3, 5)
    """
    inner = [position for position in allowed if 0 < position < len(labels)]
    nesting = {position: nesting_of(labels, position) for position in inner}
    elapsed = [0.0]
    for each in seconds:
        elapsed.append(elapsed[-1] + each)
    moved = [0]
    for cut, following in itertools.pairwise(cuts[1:]):
        there = [position for position in inner if moved[-1] < position < following or position == cut]
        if cut not in nesting or cut <= moved[-1]:
            return None
        moved.append(min(there, key=lambda at: (nesting[at], abs(elapsed[at] - elapsed[cut]))))
    found = (*moved, cuts[-1])
    return None if found == tuple(cuts) else found
