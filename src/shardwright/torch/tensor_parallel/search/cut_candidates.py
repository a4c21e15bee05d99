"""Which cuts of a parameter are worth a try: how the step uses its dimension says so.

A fused projection of queries, keys and values is known by what becomes of its result: one dimension is split
in three, and each piece is seen as heads. So each of the three segments is cut, between heads::

    weight (3 * 12, 48)  ──►  result (..., 36)  ──split──►  3 x (..., 12)  ──view──►  3 x (..., 4 heads, 3)

    segments 12 12 12, in steps of 3, over two ranks:     r0:6 r1:6 r0:6 r1:6 r0:6 r1:6

The rules of the run say where the dimension goes: one parameter is cut, all others are whole, and views of
what is cut are looked at.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import prod

from shardwright.placement import Cut, Placement
from shardwright.torch.tensor_parallel.search.flow import Flow
from shardwright.torch.tensor_parallel.search.recording import Operation
from shardwright.torch.tensor_parallel.view_dims import matching_dims

__all__ = ["cut_candidates"]

_Structure = tuple[tuple[int, ...], int]
"""Lengths of the segments of a dimension, and the step in which each may be cut."""

_MAX_SEGMENTS = 8
_MAX_CANDIDATES = 6

_RESHAPES = frozenset(["view", "_unsafe_view", "_reshape_alias"])
_SPLITS = frozenset(["split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"])


def cut_candidates(flow: Flow, name: str, dim: int, num_ranks: int) -> list[Cut]:
    """Cuts of one dimension of a parameter, those that the step suggests before the plain one."""
    size = flow.recording.tensors[flow.recording.parameters[name]].shape[dim]
    plain = Cut.even(dim, size, num_ranks=num_ranks)
    structures: dict[_Structure, None] = {((size,), 1): None}
    tried: dict[Cut, None] = {}
    # What a cut shows may tell of a better one, which comes further.
    for structure in _growing(structures):
        cut = _cut_of(structure, dim, num_ranks)
        if cut in tried or len({run.rank for run in cut.runs}) < 2:
            continue
        if len(tried) >= _MAX_CANDIDATES:
            break
        tried[cut] = None
        for found in _seen(flow, name, cut, size, list(structures)):
            structures[found] = None
    return [*(cut for cut in tried if cut != plain), plain] if plain in tried else list(tried)


def _growing(structures: dict[_Structure, None]) -> Iterator[_Structure]:
    done: set[_Structure] = set()
    while missing := [each for each in structures if each not in done]:
        done.add(missing[0])
        yield missing[0]


def _cut_of(structure: _Structure, dim: int, num_ranks: int) -> Cut:
    lengths, step = structure
    return Cut.in_segments(dim, [each // step for each in lengths], num_ranks=num_ranks).times(step)


def _seen(flow: Flow, name: str, cut: Cut, size: int, known: list[_Structure]) -> list[_Structure]:
    """What views of the cut dimension, and of pieces of it, say of its structure."""
    found: dict[_Structure, None] = {}
    steps: dict[int, None] = {}
    bounds: set[int] = set()

    def watch(operation: Operation, placed: list[Placement]) -> None:
        own = placed[operation.inputs[0]]
        if not isinstance(own, Cut):
            return
        tensor = flow.recording.tensors[operation.inputs[0]]
        length = own.size
        for lengths, step in _structures_at(operation, tuple(tensor.shape), own.dim):
            if length == size:
                found[lengths, step] = None
            elif len(lengths) == 1:
                steps[step] = None
        if operation.name == "slice" and length == size and operation.args[1:2] == (own.dim,):
            start, stop, _ = slice(*operation.args[2:4]).indices(size)
            bounds.update((start, stop))

    flow.run({name: cut}, watch=watch)
    if bounds:
        edges = sorted({0, size, *bounds})
        found[tuple(b - a for a, b in pairwise(edges)), 1] = None
    for lengths, _ in [*known, *found]:
        for step in steps:
            found[lengths, step] = None
    return [
        (lengths, step)
        for lengths, step in found
        if len(lengths) <= _MAX_SEGMENTS and all(each % step == 0 for each in lengths)
    ]


def _structures_at(operation: Operation, shape: tuple[int, ...], dim: int) -> list[_Structure]:
    """The segments and steps that an operation gives a dimension of its first input."""
    size = shape[dim]
    if operation.name in _SPLITS:
        outputs = [each for each in operation.outputs if each is not None]
        lengths = tuple(each.shape[dim] for each in outputs)
        return [(lengths, 1)] if sum(lengths) == size and len(lengths) > 1 else []
    if operation.name not in _RESHAPES or operation.outputs[0] is None or not prod(shape):
        return []
    new_shape = tuple(operation.outputs[0].shape)
    for dims, new_dims in matching_dims(shape, new_shape):
        if dims == [dim]:
            sizes = [new_shape[each] for each in new_dims]
            return [
                ((size // prod(sizes[:place]),) * prod(sizes[:place]), prod(sizes[place + 1 :]))
                for place, each in enumerate(sizes)
                if each > 1 and len(sizes) > 1
            ]
    return []
