"""Schedules as text pictures, one column for each unit of time, as papers draw them."""

from collections.abc import Sequence

from shardwright.schedule.actions import Action

__all__ = ["draw_rows"]


def draw_rows(rows: Sequence[Sequence[tuple[Action, int, int]]], *, name_stages: bool) -> str:
    """Draws one line a rank.

    Args:
        rows: for each rank, its compute actions with start and length in units of time.
        name_stages: write the stage before the kind, for ranks that run several.

    Returns:
        Lines in which ``=`` fills an action longer than one unit and ``.`` is an idle unit.
    """
    names = [
        [str(action) if name_stages else f"{action.kind.value}{action.microbatch}" for action, _, _ in row]
        for row in rows
    ]
    width = max((len(name) for row in names for name in row), default=1)
    label_width = len(f"rank {len(rows) - 1}")
    lines = []
    for rank, row in enumerate(rows):
        cells, now = [f"rank {rank}".ljust(label_width), "|"], 0
        for name, (_, start, length) in zip(names[rank], row, strict=True):
            cells += [".".ljust(width)] * (start - now)
            cells.append(name.ljust(width) if length <= 1 else name.ljust(length * (width + 1) - 1, "="))
            now = start + length
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)
