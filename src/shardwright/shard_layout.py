"""The layout of sharded parameters, in pure arithmetic; the size of a gradient bucket.

A parameter is cut along its first dimension into one piece per shard. All pieces have the same number of
rows, except the last ones, which may have fewer or none (as `torch.chunk` and FSDP2 cut). In memory every
piece takes the same room::

    parameter of 5 rows, 2 shards        piece 0: rows 0, 1, 2      piece 1: rows 3, 4 (room for 3)

    one shard (what a rank keeps)        | piece of a | piece of b | ...
    the whole (what computes)            | a: piece 0, piece 1, ... | b: piece 0, piece 1, ... | ...

so that in the whole, the rows of each parameter lie one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

_LEAST_BUCKETS = 8
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
