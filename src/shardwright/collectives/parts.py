"""Divides a range of elements over ranks and chunks."""

from collections.abc import Iterator

__all__ = ["chunks_of", "lane_of", "part_of"]

_ALIGNMENT = 16
"""Parts begin at multiples of so many elements: copies of aligned memory are faster."""


def part_of(count: int, number: int, num_parts: int) -> tuple[int, int]:
    """One of several parts of `count` elements, nearly equal ones: its start and stop.

    >>> [part_of(100, number, 3) for number in range(3)], [part_of(2, number, 3) for number in range(3)]
    ([(0, 48), (48, 80), (80, 100)], [(0, 2), (2, 2), (2, 2)])
    """
    return _boundary(count, number, num_parts), _boundary(count, number + 1, num_parts)


def _boundary(count: int, number: int, num_parts: int) -> int:
    blocks = -(-count // _ALIGNMENT)
    each, more = divmod(blocks, num_parts)
    return min(count, (number * each + min(number, more)) * _ALIGNMENT)


def chunks_of(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and stop of chunks of `count` elements, nearly equal ones of at most `size`.

    >>> list(chunks_of(100, 64)), list(chunks_of(0, 64))
    ([(0, 64), (64, 100)], [])
    """
    num_chunks = -(-count // size)
    for number in range(num_chunks):
        start, stop = part_of(count, number, num_chunks)
        if stop > start:
            yield start, stop


def lane_of(num_rows: int, width: int, number: int, num_lanes: int) -> Iterator[tuple[int, int, int]]:
    """What one of several ranks handles of rows that they share evenly: (row, start, stop).

    Where there are as many rows as ranks, each has one row.

    >>> [list(lane_of(2, 32, number, 2)) for number in range(2)]
    [[(0, 0, 32)], [(1, 0, 32)]]
    >>> [list(lane_of(3, 32, number, 2)) for number in range(2)]
    [[(0, 0, 32), (1, 0, 16)], [(1, 16, 32), (2, 0, 32)]]
    """
    start = _lane_boundary(num_rows, width, number, num_lanes)
    stop = _lane_boundary(num_rows, width, number + 1, num_lanes)
    while start < stop:
        row, inside = divmod(start, width)
        end = min(width, inside + stop - start)
        yield row, inside, end
        start += end - inside


def _lane_boundary(num_rows: int, width: int, number: int, num_lanes: int) -> int:
    row, rest = divmod(number * num_rows, num_lanes)
    return row * width + _boundary(width, rest, num_lanes)
