"""Placements, families and small tools that the tests of schedules share."""

import itertools
import re
from collections.abc import Iterator

from shardwright.schedule import Action, Edge, Kind, Schedule

NEIGHBOURS = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}

ODD_PLACEMENTS = (
    (0,),
    (0, 0, 0),
    (0, 1, 1),
    (0, 0, 1),
    (0, 1, 0),
    (1, 0, 1),
    (1, 0),
    (2, 1, 0),
    (0, 1, 0, 1, 0),
    (0, 1, 1, 0, 1),
    (0, 1, 2, 1, 0),
    (0, 2, 1, 1, 2, 0),
    (0, 1, 2, 3, 0, 1),
)
"""Placements that no paper draws."""


def all_placements(num_stages: int, max_ranks: int) -> Iterator[tuple[int, ...]]:
    """Every map of stages to ranks in which each rank up to the last has a stage."""
    for ranks in itertools.product(range(max_ranks), repeat=num_stages):
        if set(ranks) == set(range(max(ranks) + 1)):
            yield ranks


def all_edges(num_stages: int) -> tuple[Edge, ...]:
    """Every stage feeds every later one; the gradient of each third edge stays away."""
    pairs = itertools.combinations(range(num_stages), 2)
    return tuple(Edge(s, t, num_bytes=8, has_gradient=(s + t) % 3 != 0) for s, t in pairs)


def schedule_of(*rows: str) -> Schedule:
    """A schedule from rows such as ``"0F0 0SEND_F0 0B0"``; transfers go to neighbours."""
    actions = tuple(tuple(_action(cell) for cell in row.split()) for row in rows)
    owners = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    return Schedule(
        kind="test",
        stage_ranks=tuple(owners[stage] for stage in range(len(owners))),
        num_microbatches=1 + max(action.microbatch for row in actions for action in row),
        actions=actions,
    )


def _action(cell: str) -> Action:
    stage, name, microbatch = re.fullmatch(r"(\d+)([A-Z](?:[A-Z_]*[A-Z])?)(\d+)", cell).groups()
    kind = Kind(name)
    peer = int(stage) + NEIGHBOURS[kind] if kind in NEIGHBOURS else None
    return Action(kind, int(stage), int(microbatch), peer)


def text_of(schedule: Schedule) -> list[str]:
    """The rows of a schedule as such text."""
    return [" ".join(map(str, row)) for row in schedule.actions]


def count_begun(row: tuple[Action, ...]) -> int:
    """The most microbatches that a rank has begun and not wholly done, counted anew at each action."""
    most = 0
    for place in range(len(row)):
        before, after = row[: place + 1], row[place + 1 :]
        begun = {action.microbatch for action in before if action.kind is Kind.FORWARD}
        most = max(most, len(begun & {action.microbatch for action in (row[place], *after)}))
    return most


def count_kept(row: tuple[Action, ...], *, until: tuple[Kind, ...]) -> int:
    """The most activations of stages that a rank keeps from ``F`` to an action of the kinds `until`."""
    kept = most = 0
    for action in row:
        kept += (action.kind is Kind.FORWARD) - (action.kind in until)
        most = max(most, kept)
    return most
