"""Boxes: the positions of a tensor's pieces.

A piece of a tensor is a box: an offset and a length in every dimension. A replica's share of optimizer state
is a range of the flattened tensor, which consists of a few boxes::

    tensor of shape (4, 3), elements 2 to 9      . . a
                                                 b b b      three boxes: a, b, c
                                                 b b b
                                                 c . .
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape has it."""
        if not len(self.offset) == len(self.shape) == len(shape):
            return False
        places = zip(self.offset, self.shape, shape, strict=True)
        return all(o >= 0 and n >= 0 and o + n <= whole for o, n, whole in places)

    def common(self, other: "Box") -> "Box | None":
        """The intersection of both; None if it is empty."""
        offset, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offset.append(start)
            shape.append(stop - start)
        return Box(tuple(offset), tuple(shape))

    def relative_to(self, other: "Box") -> "Box":
        """The same elements, counted from the beginning of another box."""
        return Box(tuple(a - b for a, b in zip(self.offset, other.offset, strict=True)), self.shape)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up a range of a flattened tensor, in its order.

    >>> [box.shape for box in boxes_of_range((4, 3), 2, 10)]
    [(1, 1), (2, 3), (1, 1)]
    """
    if stop <= start:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if last < first:  # begins and ends in one row
        yield from _in_row(shape, first - 1, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    begin = row * prod(shape[1:])
    for box in boxes_of_range(shape[1:], start - begin, stop - begin):
        yield Box((row, *box.offset), (1, *box.shape))


def covered_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether these boxes lie in a tensor and cover each of its elements exactly once.

    >>> covered_once((4,), [Box((0,), (3,)), Box((3,), (1,))])
    True
    """
    filled = sorted(box for box in boxes if box.numel)
    if sum(box.numel for box in filled) != prod(shape):
        return False
    if not shape:
        return len(filled) == 1
    near: list[Box] = []
    for box in filled:
        near = [other for other in near if other.offset[0] + other.shape[0] > box.offset[0]]
        if any(box.common(other) for other in near):
            return False
        near.append(box)
    return True
