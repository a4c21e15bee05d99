"""Where the elements of a tensor lie: placements, and the layout of sharded parameters.

A tensor of a tensor-parallel group has one of three placements:

    ============ ======================================================================
    Whole        every rank has all elements
    PartialSum   every rank has a summand of all elements; their sum is the tensor
    Cut          every rank has some slices along one dimension
    ============ ======================================================================

A cut is a row of runs: so many slices of this rank, so many of that one. Ranks may have parts of unequal
size, several runs each, or nothing. A fused projection of queries, keys and values over two ranks::

    dimension    0         4         8        12
                 |    q    |    k    |    v    |
    runs         r0:2 r1:2 r0:2 r1:2 r0:2 r1:2
    part of r0   q0 q1 k0 k1 v0 v1                  its runs, one after the other

Runs are in a normal form (no empty run, no two neighbours of one rank), so that equal placements are equal.

A parameter is cut along its first dimension into one piece per shard. All pieces have the same number of
rows, except the last ones, which may have fewer or none (as `torch.chunk` and FSDP2 cut). In memory every
piece takes the same room::

    parameter of 5 rows, 2 shards        piece 0: rows 0, 1, 2      piece 1: rows 3, 4 (room for 3)

    one shard (what a rank keeps)        | piece of a | piece of b | ...
    the whole (what computes)            | a: piece 0, piece 1, ... | b: piece 0, piece 1, ... | ...

so that in the whole, the rows of each parameter lie one after the other.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, Self

_TEXT = re.compile(r"cut (?P<dim>\d{1,3}) \((?P<runs>r\d{1,7}:\d{1,15}( r\d{1,7}:\d{1,15})*)\)")


class Run(NamedTuple):
    """Consecutive slices that one rank holds."""

    rank: int
    length: int


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank has all elements, the same to the last bit."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The tensor is the sum of what the ranks have."""

    def __str__(self) -> str:
        return "partial sum"


@dataclass(frozen=True, slots=True)
class Cut:
    """Every rank has some slices along one dimension.

    Example:
        >>> from shardwright.placement import Cut
        >>> str(Cut.even(0, 5, num_ranks=2))
        'cut 0 (r0:2 r1:3)'
        >>> str(Cut.in_segments(1, [4, 2], num_ranks=2))
        'cut 1 (r0:2 r1:2 r0:1 r1:1)'

    Attributes:
        runs: who has its slices, from the first slice to the last, in normal form (see `Cut.of`).
    """

    dim: int
    runs: tuple[Run, ...]

    # ---- how cuts are made ----

    @classmethod
    def of(cls, dim: int, runs: Iterable[tuple[int, int]]) -> Self:
        """A cut with these runs ``(rank, length)``, brought into normal form."""
        normal: list[Run] = []
        for rank, length in runs:
            if length and normal and normal[-1].rank == rank:
                normal[-1] = Run(rank, normal[-1].length + length)
            elif length:
                normal.append(Run(rank, length))
        return cls(dim, tuple(normal))

    @classmethod
    def even(cls, dim: int, size: int, *, num_ranks: int) -> Self:
        """One run a rank, equal up to one slice; with fewer slices than ranks, some ranks have nothing."""
        return cls.in_segments(dim, [size], num_ranks=num_ranks)

    @classmethod
    def in_segments(cls, dim: int, segments: Sequence[int], *, num_ranks: int) -> Self:
        """Cuts each of several segments, which lie one after the other, evenly."""
        bounds = ([size * rank // num_ranks for rank in range(num_ranks + 1)] for size in segments)
        return cls.of(dim, ((rank, b - a) for each in bounds for rank, (a, b) in enumerate(pairwise(each))))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `str` writes.

        >>> Cut.parse("cut 0 (r0:2 r1:3)") == Cut.even(0, 5, num_ranks=2)
        True
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no cut such as 'cut 0 (r0:2 r1:3)': dimension, rank and slices")
        runs = (run.removeprefix("r").split(":") for run in found["runs"].split(" "))
        return cls.of(int(found["dim"]), ((int(rank), int(length)) for rank, length in runs))

    # ---- what it says ----

    @property
    def size(self) -> int:
        """Slices along the dimension, of all ranks."""
        return sum(run.length for run in self.runs)

    def length(self, rank: int) -> int:
        """Slices that a rank has."""
        return sum(run.length for run in self.runs if run.rank == rank)

    def intervals(self, rank: int) -> list[tuple[int, int]]:
        """The slices ``[start, stop)`` of the tensor that a rank has, ascending."""
        return [(a, b) for owner, a, b in self.bounds() if owner == rank]

    def bounds(self) -> list[tuple[int, int, int]]:
        """``(rank, start, stop)`` of each run."""
        found, start = [], 0
        for rank, length in self.runs:
            found.append((rank, start, start + length))
            start += length
        return found

    def reaches(self, num_ranks: int) -> bool:
        """Whether each of so many ranks has at least one slice."""
        return len({run.rank for run in self.runs}) == num_ranks

    # ---- cuts of what is made from the tensor ----

    def at(self, dim: int) -> "Cut":
        """The same runs along another dimension."""
        return self if dim == self.dim else Cut(dim, self.runs)

    def repeated(self, times: int) -> "Cut":
        """The cut of so many copies of the dimension, one after the other."""
        return Cut.of(self.dim, self.runs * times)

    def times(self, factor: int) -> "Cut":
        """The cut after each slice became so many."""
        return Cut.of(self.dim, ((rank, length * factor) for rank, length in self.runs))

    def over(self, factor: int) -> "Cut | None":
        """The cut after so many slices became one; None if two ranks would have parts of a slice."""
        if any(length % factor for _, length in self.runs):
            return None
        return Cut.of(self.dim, ((rank, length // factor) for rank, length in self.runs))

    def slice(self, start: int, stop: int, step: int = 1) -> "Cut":
        """The cut of ``tensor[start:stop:step]`` along the dimension; bounds within the tensor, step > 0."""

        def count(bound: int) -> int:
            return -((min(max(bound, start), stop) - start) // -step)

        return Cut.of(self.dim, ((rank, count(b) - count(a)) for rank, a, b in self.bounds()))

    def local_slice(self, rank: int, start: int, stop: int, step: int = 1) -> tuple[int, int]:
        """Bounds, within a rank's part, of its share of ``tensor[start:stop:step]``.

        The step stays the same within a run, but not over the gap between two runs of the rank.
        """
        own = self.intervals(rank)
        if step != 1 and len(own) > 1:
            raise ValueError(f"a step of {step} over {len(own)} runs of rank {rank}: local slices are uneven")
        if step != 1 and own:
            a, b = own[0]
            first = start if start >= a else start + -((a - start) // -step) * step
            return min(first, b) - a, max(min(stop, b), min(first, b)) - a
        before = sum(max(0, min(b, start) - a) for a, b in own)
        inside = sum(max(0, min(b, stop) - max(a, start)) for a, b in own)
        return before, before + inside

    def reversed(self) -> "Cut":
        """The cut of the tensor with the dimension flipped."""
        return Cut(self.dim, self.runs[::-1])

    def __str__(self) -> str:
        return f"cut {self.dim} ({' '.join(f'r{rank}:{length}' for rank, length in self.runs)})"


Placement = Whole | PartialSum | Cut

WHOLE = Whole()
PARTIAL_SUM = PartialSum()

LEAST_CUT_AGAIN = 2
"""Elements that each rank has of a part that is cut again.

With one, ranks came to exchange different messages (test_parts_of_one_position_are_not_cut_again).
"""


@dataclass(frozen=True, slots=True)
class BetweenUnits:
    """Where tensors between units are, by their shapes alone, so that all stages of a pipeline agree.

    Attributes:
        dim: along which they are cut; None: every rank has all of them.
        lengths: of that dimension, of tensors that are cut; all others are whole.
        inner_ranks: that share each part in turn (`torch/tensor_parallel/nesting.py`).
        inner_dim: along which those ranks cut each part; None: each has all of it.
        inner_lengths: of that dimension, where it is another one, of parts that are cut.

    Example:
        >>> from shardwright.placement import BetweenUnits
        >>> of_batch = BetweenUnits.of_batch([(8, 5), (8,)], 1, num_ranks=2)
        >>> print(of_batch.placement((8, 5, 64)), of_batch.placement((8, 4, 5, 5)))
        cut 1 (r0:2 r1:3) whole
        >>> samples = BetweenUnits.of_batch([(8, 6), (8,)], 0, num_ranks=2, inner_ranks=3, inner_dim=1)
        >>> print(samples.placement((8, 6, 64)), samples.inside.placement((4, 6, 64)))
        cut 0 (r0:4 r1:4) cut 1 (r0:2 r1:2 r2:2)
    """

    num_ranks: int
    dim: int | None = None
    lengths: frozenset[int] = frozenset()
    inner_ranks: int = 1
    inner_dim: int | None = None
    inner_lengths: frozenset[int] = frozenset()

    @classmethod
    def of_batch(
        cls,
        shapes: Iterable[Sequence[int]],
        dim: int | None,
        *,
        num_ranks: int,
        inner_ranks: int = 1,
        inner_dim: int | None = None,
    ) -> Self:
        """Cuts what is as long along a dimension as some tensor of the batch."""
        if dim is None:
            return cls(num_ranks, inner_ranks=inner_ranks)
        shapes = list(shapes)
        inner = _lengths(shapes, inner_dim, num_ranks=inner_ranks) if inner_dim != dim else frozenset()
        return cls(num_ranks, dim, _lengths(shapes, dim, num_ranks=num_ranks), inner_ranks, inner_dim, inner)

    @property
    def inside(self) -> "BetweenUnits":
        """Where the parts of tensors that are cut are, among the ranks that share each part."""
        if self.dim is None or self.inner_dim is None:
            return BetweenUnits(self.inner_ranks)
        if self.inner_dim != self.dim:
            return BetweenUnits(self.inner_ranks, self.inner_dim, self.inner_lengths)
        cuts = (Cut.even(self.dim, length, num_ranks=self.num_ranks) for length in self.lengths)
        parts = ({cut.length(rank) for rank in range(self.num_ranks)} for cut in cuts)
        fitting = [lengths for lengths in parts if min(lengths) >= LEAST_CUT_AGAIN * self.inner_ranks]
        return BetweenUnits(self.inner_ranks, self.dim, frozenset().union(*fitting))

    @property
    def cuts(self) -> bool:
        """Whether any tensor may be cut."""
        return self.dim is not None

    @property
    def is_uneven(self) -> bool:
        """Whether some ranks have more of a tensor than others."""
        if any(length % self.num_ranks for length in self.lengths):
            return True
        return self.inner_dim is not None and self.inside.is_uneven

    def placement(self, shape: Sequence[int]) -> Whole | Cut:
        """The placement of a tensor of this shape."""
        if self.dim is None or self.dim >= len(shape) or shape[self.dim] not in self.lengths:
            return WHOLE
        return Cut.even(self.dim, shape[self.dim], num_ranks=self.num_ranks)

    def share(self, shape: Sequence[int]) -> float:
        """The share of a tensor of this shape that the rank with most has."""
        cut = self.placement(shape)
        if isinstance(cut, Whole):
            return 1.0
        most = max(cut.length(rank) for rank in range(self.num_ranks))
        if self.inner_dim is None:
            return most / cut.size
        assert self.dim is not None
        part = (*shape[: self.dim], most, *shape[self.dim + 1 :])
        return most / cut.size * self.inside.share(part)


def _lengths(shapes: Iterable[Sequence[int]], dim: int | None, *, num_ranks: int) -> frozenset[int]:
    """Of a dimension, those that have a slice for each rank."""
    if dim is None:
        return frozenset()
    lengths = (shape[dim] for shape in shapes if len(shape) > dim)
    return frozenset(length for length in lengths if length >= num_ranks)


_LEAST_BUCKETS = 8
SHARDED_BUCKET_BYTES = 4 * 5_000_000
"""Most bytes of sharded parameters in one bucket of gradients."""
_LEAST_BYTES = 2**20


def size_of_buckets(num_bytes: int, *, most: int) -> int:
    """Bytes of a bucket where there are `num_bytes` of gradients.

    What the backward fills last is summed when it has ended, with nothing left to hide it: there are eight
    buckets at least, as long as none has less than a mebibyte.

    >>> [size_of_buckets(n * 2**20, most=25 * 2**20) / 2**20 for n in (4, 40, 4000)]
    [1.0, 5.0, 25.0]
    """
    return min(most, max(_LEAST_BYTES, num_bytes // _LEAST_BUCKETS))


@dataclass(frozen=True)
class ShardLayout:
    """The shards of some parameters.

    Attributes:
        shapes: of the parameters; each has at least one dimension.

    >>> layout = ShardLayout(((5, 2), (4,)), 2)
    >>> layout.piece_sizes, layout.shard_size, layout.rows(0, 1)
    ((6, 2), 8, range(3, 5))
    """

    shapes: tuple[tuple[int, ...], ...]
    num_shards: int

    @cached_property
    def piece_sizes(self) -> tuple[int, ...]:
        """Elements of a piece of each parameter, with those that only fill its room."""
        return tuple(self._rows_in_piece(shape) * prod(shape[1:]) for shape in self.shapes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the piece of each parameter begins in a shard."""
        return tuple(accumulate(self.piece_sizes, initial=0))[:-1]

    @cached_property
    def shard_size(self) -> int:
        """Elements of a shard."""
        return sum(self.piece_sizes)

    @property
    def whole_size(self) -> int:
        """Elements of all shards together."""
        return self.shard_size * self.num_shards

    def whole_start(self, index: int) -> int:
        """Where a parameter begins in the whole."""
        return self.starts[index] * self.num_shards

    def rows(self, index: int, shard: int) -> range:
        """The rows of a parameter that a shard has."""
        shape = self.shapes[index]
        size = self._rows_in_piece(shape)
        return range(min(shard * size, shape[0]), min((shard + 1) * size, shape[0]))

    def piece_shape(self, index: int, shard: int) -> tuple[int, ...]:
        """The shape of the rows that a shard has."""
        return len(self.rows(index, shard)), *self.shapes[index][1:]

    def _rows_in_piece(self, shape: Sequence[int]) -> int:
        return -(-shape[0] // self.num_shards)
