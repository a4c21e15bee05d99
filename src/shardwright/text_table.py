"""Rows of text in columns."""

from collections.abc import Sequence

from shardwright.printable import printable

__all__ = ["align"]


def align(rows: Sequence[Sequence[str]]) -> str:
    """Lays out rows of text in columns, whatever names are among it.

    >>> print(align([["rank", "memory"], ["0", "1.5 GiB"]]))
    rank  memory
    0     1.5 GiB
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
