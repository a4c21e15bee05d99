"""Reads and writes schedules in PyTorch's CSV form.

One row per rank, one action per cell: stage, kind, microbatch. An empty cell is a bubble. PyTorch calls a
file without transfers ``compute_only`` and one with them ``compute_comms``::

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

A transfer does not name its peer: ``1SEND_F0`` goes to stage 2, ``1SEND_B0`` to stage 0. A stage is placed on
the rank whose row has its actions. ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD`` belong to PyTorch's sharded
parameters and are dropped; ``(0F1;3B0)OVERLAP_F_B`` is read as its actions in order. ``OFFLOAD`` and ``LOAD``
are ours: PyTorch does not read a file that has them.
"""

import csv
import io
import os
import re
from collections.abc import Iterator

from shardwright.errors import ScheduleError
from shardwright.files import UserFile, replace_file
from shardwright.printable import printable
from shardwright.schedule.actions import TRANSFERS, Action, Kind
from shardwright.schedule.schedule import Schedule

__all__ = ["format_torch_csv", "parse_torch_csv", "read_torch_csv", "write_torch_csv"]

_MOST_BYTES = 4 * 2**20  # a million actions
_ACTION = re.compile(r"(\d{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|OFFLOAD|LOAD|F|B|I|W)(\d{1,6})")
_DROPPED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")

_PEER_OFFSET = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}


def format_torch_csv(schedule: Schedule) -> str:
    """A schedule in PyTorch's CSV form: ``compute_comms`` if it has transfers, else ``compute_only``.

    Raises:
        ScheduleError: a transfer joins stages that are not neighbours, which the form cannot say.

    >>> from shardwright.schedule import build_schedule
    >>> format_torch_csv(build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=2))
    '0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n'
    """
    for rank, row in enumerate(schedule.actions):
        for action in row:
            offset = _PEER_OFFSET.get(action.kind)
            if offset is not None and action.peer != action.stage + offset:
                raise ScheduleError(
                    f"rank {rank}: {action} has peer stage {action.peer}, but PyTorch's CSV knows transfers "
                    "between neighbours only. Write the schedule without transfers."
                )
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def write_torch_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes `format_torch_csv` to a file."""
    replace_file(path, format_torch_csv(schedule))


def read_torch_csv(path: str | os.PathLike[str]) -> Schedule:
    """Reads a file in PyTorch's CSV form; raises as `parse_torch_csv`, and if there is no such file."""
    file = UserFile(
        path,
        what="schedule",
        error=ScheduleError,
        advice="Give a CSV file of PyTorch's",
        most_bytes=_MOST_BYTES,
    )
    return parse_torch_csv(file.read_text(), source=printable(os.fspath(path)))


def parse_torch_csv(text: str, *, source: str = "torch_csv") -> Schedule:
    """Reads PyTorch's CSV form.

    The result is as complete and as free of deadlock as the file; `validate` tells.

    Args:
        text: one row a rank.
        source: names the file in errors, and becomes the kind of the schedule.

    Raises:
        ScheduleError: a cell is no action, a stage stands in two rows, or a rank or a stage has none; row and
            column are named, both from 1.

    >>> print(parse_torch_csv("0F0,,(0F1;0B0)OVERLAP_F_B,0B1"))
    rank 0 | 0F0 0F1 0B0 0B1
    """
    rows: list[tuple[Action, ...]] = []
    owners: dict[int, int] = {}
    for rank, cells in enumerate(_split_cells(text, source)):
        row = []
        for column, cell in enumerate(cells, start=1):
            place = f"{source}, row {rank + 1} (rank {rank}), column {column}"
            for action in _parse_cell(cell.strip(), place):
                if owners.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"{place}: {action} belongs to stage {action.stage}, which row "
                        f"{owners[action.stage] + 1} runs already. Keep all actions of a stage in one row."
                    )
                row.append(action)
        if not row:
            raise ScheduleError(f"{source}, row {rank + 1} (rank {rank}) has no action. Remove the row.")
        rows.append(tuple(row))
    missing = sorted(set(range(max(owners, default=0) + 1)) - set(owners))
    if missing:
        raise ScheduleError(f"{source} has no action of stage {missing[0]}. Number the stages 0, 1, ...")
    return Schedule(
        kind=source,
        stage_ranks=tuple(owners[stage] for stage in range(len(owners))),
        num_microbatches=1 + max(action.microbatch for row in rows for action in row),
        actions=tuple(rows),
    )


def _split_cells(text: str, source: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text.rstrip("\r\n"))))
    except csv.Error as error:
        raise ScheduleError(
            f"{source} is no CSV: {error}. Give one row a rank, cells apart by commas."
        ) from error


def _parse_cell(cell: str, place: str) -> Iterator[Action]:
    if not cell or _DROPPED.fullmatch(cell):
        return
    if overlap := _OVERLAP.fullmatch(cell):
        for part in overlap[1].split(";"):
            yield from _parse_cell(part.strip(), place)
        return
    match = _ACTION.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"{place}: {cell[:80]!r} is no action. "
            f"Write stage, kind (one of {', '.join(Kind)}) and microbatch, for example 2F0."
        )
    kind, stage = Kind(match[2]), int(match[1])
    peer = stage + _PEER_OFFSET[kind] if kind in TRANSFERS else None
    yield Action(kind, stage, int(match[3]), peer)
