"""The hops of a collective over nodes: their groups, and the order in which they are issued.

::

    turn       0        1        2        3
    across  chunk 0  chunk 1  chunk 2                     hop 0, here that of an all-gather
    inside           chunk 0  chunk 1  chunk 2            hop 1

All ranks issue all hops in this one order, whichever could begin first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["LANES", "Hop", "Hops", "Lane", "spans"]

Lane = Literal["across", "inside"]
"""The groups of a rank: those with its place on each node, and its own node."""
LANES: tuple[Lane, ...] = ("across", "inside")


@dataclass(frozen=True, slots=True)
class Hop:
    """The operation of a hop on each chunk.

    Attributes:
        lane: the group that does it.
        do: issues it, for the chunk of a number.
    """

    lane: Lane
    do: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Hops:
    """A collective on one rank.

    Attributes:
        hops: that each chunk makes one after the other.
    """

    hops: Sequence[Hop]
    num_chunks: int

    def in_order(self) -> Iterator[tuple[Hop, int]]:
        """The hops of all chunks, in the order in which they are issued.

        >>> gather = Hops([Hop("across", print), Hop("inside", print)], 2)
        >>> [(hop.lane, chunk) for hop, chunk in gather.in_order()]
        [('across', 0), ('across', 1), ('inside', 0), ('inside', 1)]
        """
        for turn in range(self.num_chunks + len(self.hops) - 1):
            for number, hop in enumerate(self.hops):
                if 0 <= turn - number < self.num_chunks:
                    yield hop, turn - number


def spans(count: int, chunk: int) -> list[tuple[int, int]]:
    """The spans of the chunks.

    >>> spans(5, 2), spans(5, 0)
    ([(0, 2), (2, 4), (4, 5)], [(0, 5)])
    """
    step = chunk or count
    return [(start, min(start + step, count)) for start in range(0, count, step)]
