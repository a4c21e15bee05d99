"""Changes the placement of a tensor, and of one whose parts other ranks share in turn.

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

`spec.py` lists the collective of each change, and what it sends. Pieces travel as bytes, so that every
type of elements can travel; only sums travel as numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardwright.placement import Cut, PartialSum, Placement, Whole
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.spec import dense_strides, is_dense, local_shape, put_in_order


@dataclass(frozen=True, slots=True)
class _MovedParts:
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
) -> _MovedParts | None:
    """What a change of an outer placement is for the elements of one rank.

    >>> heads, positions = Cut.even(1, 8, num_ranks=2), Cut.even(2, 6, num_ranks=2)
    >>> move = moved_parts(heads, positions, Cut.in_segments(1, [4, 4], num_ranks=2), rank=0, num_ranks=2)
    >>> print(move.target, move.after)
    cut 1 (r0:2 r1:2) cut 1 (r0:2 r1:2)
    >>> moved_parts(heads, positions, heads, rank=0, num_ranks=2) is None
    True
    """
    if not isinstance(inner, Cut):
        return _MovedParts(source, target, inner, inner)
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
    return _MovedParts(source, target, whole, after)


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


def replaced(
    group: TensorGroup,
    data: Tensor,
    *,
    shape: Sequence[int],
    strides: Sequence[int],
    source: Placement,
    target: Placement,
) -> Tensor:
    """What this rank has of a tensor in another placement. All ranks of the group call it."""
    if source == target:
        return data
    if getattr(data, "_spec", None) is not None:  # a part that other ranks share
        return data.replaced_in(group, shape, strides, source, target)  # type: ignore[attr-defined, no-any-return]
    group.traffic.count(group.transfer(shape, source, target), data.element_size())
    match source, target:
        case Whole(), Cut():
            return narrowed(group, data, shape, strides, target)
        case Whole(), PartialSum():
            return data if group.rank == 0 else torch.zeros_like(data)
        case Cut(), PartialSum():
            whole = data.new_zeros(tuple(shape))
            write_part(whole, data, source, group.rank)
            return whole
        case PartialSum(), Whole():
            return _summed(group, data)
        case PartialSum(), Cut():
            return _reduce_scatter(group, data, target)
        case Cut(), Whole():
            return _gathered(group, data, shape, strides, source)
        case Cut(), Cut():
            return _exchange(group, data, shape, strides, source, target)
    raise TypeError(f"{source!r} or {target!r} is no placement")


def narrowed(
    group: TensorGroup, data: Tensor, shape: Sequence[int], strides: Sequence[int], target: Cut
) -> Tensor:
    """This rank's part of a tensor that every rank has."""
    part = own_part(data, target, group.rank)
    # Kernels may take tensors that they made themselves for dense, without a look at the strides.
    if is_dense(shape, strides) and not is_dense(part.shape, part.stride()):
        part = put_in_order(part, strides)
    return part


def own_part(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """A rank's part of a tensor; a view of it if the part is one run."""
    return _joined([whole.narrow(cut.dim, a, b - a) for a, b in cut.intervals(rank)], whole, cut.dim)


def write_part(whole: Tensor, part: Tensor, cut: Cut, rank: int) -> None:
    """Puts a rank's part where it belongs in a tensor."""
    start = 0
    for a, b in cut.intervals(rank):
        whole.narrow(cut.dim, a, b - a).copy_(part.narrow(cut.dim, start, b - a))
        start += b - a


def _joined(pieces: list[Tensor], like: Tensor, dim: int) -> Tensor:
    if not pieces:
        return like.narrow(dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _summed(group: TensorGroup, data: Tensor) -> Tensor:
    summed = data.clone()
    flat = summed.as_strided((summed.numel(),), (1,), summed.storage_offset())  # a clone is dense
    group.collectives.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, "sum")
    return summed


def _reduce_scatter(group: TensorGroup, data: Tensor, target: Cut) -> Tensor:
    """Each rank gets all ranks' summands of its part, and adds them in the order of the ranks."""
    pieces = [own_part(data, target, rank) for rank in range(group.num_ranks)]
    own = pieces[group.rank]
    summands = all_to_all(group, [[piece] for piece in pieces], [own.numel()] * group.num_ranks, data)
    total = data.new_empty_strided(tuple(own.shape), dense_strides(own.shape, data.stride()))
    total.copy_(summands[0].view(own.shape))
    for summand in summands[1:]:
        total += summand.view(own.shape)
    return total


def _gathered(
    group: TensorGroup, data: Tensor, shape: Sequence[int], strides: Sequence[int], source: Cut
) -> Tensor:
    whole = data.new_empty_strided(tuple(shape), dense_strides(shape, strides))
    most = max(source.length(rank) for rank in range(group.num_ranks))
    slice_size = prod(shape) // max(source.size, 1)
    sent = data.new_empty(most * slice_size)
    sent[: data.numel()] = data.reshape(-1)
    if data.numel() < sent.numel():  # a dry run takes these for another rank's, and computes with them
        sent[data.numel() :] = 0
    parts = data.new_empty(group.num_ranks * most * slice_size)
    if sent.numel():
        group.collectives.all_gather(parts.view(torch.uint8), sent.view(torch.uint8))
    for rank in range(group.num_ranks):
        own = local_shape(tuple(shape), source, rank)
        part = parts[rank * most * slice_size :][: prod(own)].view(own)
        write_part(whole, part, source, rank)
    return whole


def _exchange(
    group: TensorGroup,
    data: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    source: Cut,
    target: Cut,
) -> Tensor:
    own = local_shape(tuple(shape), target, group.rank)
    result = data.new_empty_strided(own, dense_strides(own, strides))
    sent, places = [], []
    for rank in range(group.num_ranks):
        sent.append([_narrowed(data, here) for here, _ in _blocks(source, target, group.rank, rank)])
        places.append([_narrowed(result, here) for _, here in _blocks(source, target, rank, group.rank)])
    received = all_to_all(group, sent, [sum(place.numel() for place in each) for each in places], data)
    for each, piece in zip(places, received, strict=True):
        numbers = torch.split(piece, [place.numel() for place in each])
        for place, own_numbers in zip(each, numbers, strict=True):
            place.copy_(own_numbers.view(place.shape))
    return result


_Range = tuple[int, int, int]
"""Dimension, start and length."""


def _blocks(source: Cut, target: Cut, sender: int, receiver: int) -> list[tuple[list[_Range], list[_Range]]]:
    """Where each block that one rank sends another lies in the part of either."""
    found = []
    sent_start = 0
    for a, b in source.intervals(sender):
        kept_start = 0
        for c, d in target.intervals(receiver):
            if source.dim != target.dim:
                sent = [(source.dim, sent_start, b - a), (target.dim, c, d - c)]
                found.append((sent, [(source.dim, a, b - a), (target.dim, kept_start, d - c)]))
            elif max(a, c) < min(b, d):
                first, length = max(a, c), min(b, d) - max(a, c)
                sent = [(source.dim, sent_start + first - a, length)]
                found.append((sent, [(target.dim, kept_start + first - c, length)]))
            kept_start += d - c
        sent_start += b - a
    return found


def _narrowed(data: Tensor, ranges: list[_Range]) -> Tensor:
    for dim, start, length in ranges:
        data = data.narrow(dim, start, length)
    return data


def all_to_all(
    group: TensorGroup, sent: Sequence[list[Tensor]], counts: Sequence[int], like: Tensor
) -> list[Tensor]:
    """Sends each rank the elements of its tensors, and returns so many elements from each rank."""
    flat = [piece.reshape(-1) for pieces in sent for piece in pieces]
    data = torch.cat(flat) if flat else like.new_empty(0)
    received = like.new_empty(sum(counts))
    item = like.element_size()
    group.collectives.all_to_all(
        received.view(torch.uint8),
        data.view(torch.uint8),
        [count * item for count in counts],
        [sum(piece.numel() for piece in pieces) * item for pieces in sent],
    )
    return list(torch.split(received, list(counts)))
