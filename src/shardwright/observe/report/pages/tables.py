"""Tables of a page: they fit a phone, where a wide row becomes a block, and mark the worst row."""

from collections.abc import Collection, Sequence

from shardwright.quantities import format_bytes, format_seconds

__all__ = ["bytes_of", "difference", "seconds_of", "table"]


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    worst: int | None = None,
    finer: Collection[int] = (),
    text: Collection[int] = (0,),
    wide: bool = False,
) -> str:
    """A table of cells that are HTML."""
    kinds = ["text" if column in text else "figure" for column in range(len(header))]
    head = "".join(f'<th class="{kind}">{cell}</th>' for kind, cell in zip(kinds, header, strict=True))
    body = []
    for number, row in enumerate(rows):
        mark = ' class="worst"' if number == worst else ' class="finer"' if number in finer else ""
        cells = "".join(
            f'<td class="{kind}" data-label="{name}">{cell}</td>'
            for kind, name, cell in zip(kinds, header, row, strict=True)
        )
        body.append(f"<tr{mark}>{cells}</tr>")
    kind = "rows wide" if wide or len(header) > 4 else "rows"
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def seconds_of(value: float | None) -> str:
    """Seconds as a cell; a dash where they are not known.

    >>> seconds_of(0.0123), seconds_of(0.0), seconds_of(None)
    ('12.3 ms', '0', '-')
    """
    if value is None:
        return "-"
    return "0" if abs(value) < 5e-9 else format_seconds(value)


def bytes_of(value: float | None) -> str:
    """Bytes as a cell; a dash where they are not known."""
    return "-" if value is None else format_bytes(value)


def difference(predicted: float | None, measured: float | None, *, num_bytes: bool = False) -> str:
    """How much more was measured than predicted, and the share of that; a dash where one is not known.

    A line may break between the two, and nowhere else.

    >>> [difference(0.1, other).replace("\xa0", "_") for other in (0.105, 0.1, None)]
    ['+5.00_ms (+5%)', '0', '-']
    """
    if predicted is None or measured is None:
        return "-"
    found = measured - predicted
    shown = bytes_of(abs(found)) if num_bytes else seconds_of(abs(found))
    if shown in ("0", "0 B"):
        return "0"
    share = f"({found / predicted * 100:+.0f}%)" if predicted > 0 and abs(found) < 10 * predicted else ""
    apart = f"{'+' if found > 0 else '-'}{shown}".replace(" ", "\xa0")
    return f"{apart} {share}".rstrip()
