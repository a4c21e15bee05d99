"""Draws schedules as text, one column per unit of time, as papers do."""

from collections.abc import Sequence

from shardwright.schedule.actions import Action, Kind

__all__ = ["draw_rows"]

Row = Sequence[tuple[Action, int, int]]
"""Actions with start and length in units of time."""

_LETTERS = {Kind.OFFLOAD: "O", Kind.LOAD: "L"}


def draw_rows(rows: Sequence[Row], *, name_stages: bool, copies: Sequence[Row] = ()) -> str:
    """Draws one line a rank, and one below for its host where anything is copied there."""
    lines: list[tuple[str, Row]] = []
    for rank, row in enumerate(rows):
        lines.append((f"rank {rank}", row))
        if copies and copies[rank]:
            lines.append((f"host {rank}", copies[rank]))
    width = max((len(_name(action, name_stages)) for row in rows for action, _, _ in row), default=1)
    label_width = len(f"rank {len(rows) - 1}")
    drawn = []
    for label, row in lines:
        cells, now = [label.ljust(label_width), "|"], 0
        for action, start, length in row:
            name = _name(action, name_stages)
            cells += [".".ljust(width)] * (start - now)
            cells.append(name.ljust(width) if length <= 1 else name.ljust(length * (width + 1) - 1, "="))
            now = start + length
        drawn.append(" ".join(cells).rstrip())
    return "\n".join(drawn)


def _name(action: Action, name_stages: bool) -> str:
    stage = str(action.stage) if name_stages else ""
    return f"{stage}{_LETTERS.get(action.kind, action.kind.value)}{action.microbatch}"
