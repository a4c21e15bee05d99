"""Ranks in a grid: those of a column share a tensor, those of a row share each part of it.

A `DividedTensor` may hold, as this rank's part, another one. The outer one's group shares sequences, say, and
the inner one's group shares layers::

    hidden states (B, S, H) of 2 x 2 ranks     outer: S cut over columns    inner: H cut over rows

                    inner rank 0      inner rank 1
    outer rank 0    S first, H first  S first, H last
    outer rank 1    S last,  H first  S last,  H last

Each level decides by its own rules: the outer one by the whole shape, and what it runs on its parts is an
operation of the inner one. Parameters are tensors of the inner group alone, whole for the outer one, so that
optimizers, checkpoints and clipping see what they see without an outer group.

When the outer group changes a placement, each rank exchanges its own elements with the ranks that have its
place in their inner groups. That needs the same inner placement on all ranks of the outer group. As a rule
they have it: results of equal shapes are placed alike, and a decision's first run compares them
(`NestedDecision`). Where both cut one dimension, parts may be cut in different ways; then the inner group
gathers a part before the outer group moves it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.placement import Cut, Placement


@dataclass(frozen=True, slots=True)
class MovedParts:
    """A change of an outer placement, as one rank of an inner group sees it.

    Attributes:
        source, target: of all the elements that ranks with its place have.
        whole: how the inner group shares the tensor where the outer one does not cut it.
        after: how the inner group shares the new part.
    """

    source: Placement
    target: Placement
    whole: Placement
    after: Placement


def moved_parts(
    inner: Placement, source: Placement, target: Placement, *, rank: int, num_ranks: int
) -> MovedParts | None:
    """What a change of an outer placement is for the elements of one rank.

    >>> heads, positions = Cut.even(1, 8, num_ranks=2), Cut.even(2, 6, num_ranks=2)
    >>> move = moved_parts(heads, positions, Cut.in_segments(1, [4, 4], num_ranks=2), rank=0, num_ranks=2)
    >>> print(move.target, move.after)
    cut 1 (r0:2 r1:2) cut 1 (r0:2 r1:2)
    >>> moved_parts(heads, positions, heads, rank=0, num_ranks=2) is None
    True
    """
    if not isinstance(inner, Cut):
        return MovedParts(source, target, inner, inner)
    dim, whole = inner.dim, inner
    if isinstance(source, Cut) and source.dim == dim:
        if len({source.length(each) for each in range(num_ranks)}) > 1:
            return None
        shared = list(_of_parts(source, inner))
        whole = Cut.of(dim, ((own, length) for _, own, length in shared))
        source = Cut.of(dim, ((outer, length) for outer, own, length in shared if own == rank))
    after = whole
    if isinstance(target, Cut) and target.dim == dim:
        shared = list(_common(target, whole))
        parts = [
            Cut.of(dim, ((own, length) for outer, own, length in shared if outer == each))
            for each in range(num_ranks)
        ]
        if len(set(parts)) > 1:
            return None
        after = parts[0]
        target = Cut.of(dim, ((outer, length) for outer, own, length in shared if own == rank))
    return MovedParts(source, target, whole, after)


def agreed_placement(inner: Placement, outer: Placement) -> str:
    """What the ranks of an outer group must have in common of the placements of their parts."""
    return f"cut {inner.dim}" if isinstance(inner, Cut) and _cuts_again(inner, outer) else str(inner)


def own_placement(inner: Placement, outer: Placement, *, inner_ranks: int) -> str:
    """How a rank's part is cut along the dimension of the outer cut; empty where its length says so.

    Of ``logits[:, :-1]``, the last rank of the outer group has a part without its last position, where the
    others have all of theirs. If two such texts differ, what stands for all of them is kept with the parts
    (`Spec.apart`). So two tensors that one rank cannot tell apart, no other rank can: a decision that is new
    to one is new to all, and all of them ask.

    >>> rows = Cut.of(0, [(0, 5), (1, 4)])
    >>> own_placement(Cut.of(0, [(0, 3), (1, 2)]), rows, inner_ranks=2)
    'cut 0 (r0:3 r1:2)'
    >>> own_placement(Cut.of(0, [(0, 2), (1, 2)]), rows, inner_ranks=2)
    ''
    """
    if not (isinstance(inner, Cut) and _cuts_again(inner, outer)):
        return ""
    return "" if inner == Cut.even(inner.dim, inner.size, num_ranks=inner_ranks) else str(inner)


def _cuts_again(inner: Cut, outer: Placement) -> bool:
    return isinstance(outer, Cut) and inner.dim == outer.dim


def _common(outer: Cut, inner: Cut) -> Iterator[tuple[int, int, int]]:
    """Runs ``(outer rank, inner rank, length)`` of two cuts of one dimension."""
    for a, start, stop in outer.bounds():
        for b, first, last in inner.bounds():
            length = min(stop, last) - max(start, first)
            if length > 0:
                yield a, b, length


def _of_parts(outer: Cut, inner: Cut) -> Iterator[tuple[int, int, int]]:
    """Runs as `_common` gives them, of a cut and of that of each of its parts."""
    taken: dict[int, int] = {}
    for rank, length in outer.runs:
        start = taken.get(rank, 0)
        taken[rank] = start + length
        for owner, first, last in inner.bounds():
            common = min(start + length, last) - max(start, first)
            if common > 0:
                yield rank, owner, common
