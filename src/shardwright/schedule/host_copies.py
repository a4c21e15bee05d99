"""Copies a stage's kept activations to host memory, and back.

::

    rank 0    [ 0F0 ][ 0F1 ]      [ 0B1 ]      [ 0B0 ]
    its host         [ OFFLOAD 0 ]      [ LOAD 0 ]

Each rank has one channel to its host: copies in either direction wait for one another, in the order of its
row.
"""

from collections.abc import Collection, Sequence
from typing import NoReturn

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import HOST_COPIES, Action, Kind

__all__ = ["check_host_copies", "row_with_host_copies"]

_Key = tuple[int, int]  # stage, microbatch


def row_with_host_copies(row: Sequence[Action], stages: Collection[int]) -> tuple[Action, ...]:
    """Adds the copies of what some stages keep.

    ``OFFLOAD`` stands behind the forward, ``LOAD`` one compute action before the backward: where that follows
    its forward, between the two.

    >>> from shardwright.schedule import build_schedule
    >>> row = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=2).actions[0]
    >>> " ".join(map(str, row_with_host_copies(row, {0})))
    '0F0 0OFFLOAD0 0LOAD0 0F1 0OFFLOAD1 0LOAD1 0B0 0B1'
    """
    found: list[Action] = []
    latest = 0  # place of the compute action before
    for action in row:
        copies = action.stage in stages
        if copies and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            behind = found.index(Action(Kind.OFFLOAD, action.stage, action.microbatch)) + 1
            found.insert(max(latest, behind), Action(Kind.LOAD, action.stage, action.microbatch))
        latest = len(found)
        found.append(action)
        if copies and action.kind is Kind.FORWARD:
            found.append(Action(Kind.OFFLOAD, action.stage, action.microbatch))
    return tuple(found)


def check_host_copies(row: Sequence[Action], rank: int) -> None:
    """Refuses copies that no run could make.

    What a forward keeps is offloaded once, after it, and loaded once before the backward (``B``, or ``I``).
    """
    if not any(action.kind in HOST_COPIES for action in row):
        return
    kept: set[_Key] = set()  # on the device, by a forward, and not loaded
    offloaded: set[_Key] = set()
    for action in row:
        key = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            kept.add(key)
        elif action.kind is Kind.OFFLOAD:
            if key not in kept:
                _refuse(
                    rank, action, "nothing is kept then that was not offloaded before", "Put it after its F"
                )
            kept.discard(key)
            offloaded.add(key)
        elif action.kind is Kind.LOAD:
            if key not in offloaded:
                _refuse(rank, action, "nothing is offloaded then", "Put it after its OFFLOAD")
            offloaded.discard(key)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            if key in offloaded:
                _refuse(rank, action, "what it needs is in the host's memory", "Put the LOAD before it")
            kept.discard(key)
    for stage, microbatch in sorted(offloaded):
        action = Action(Kind.OFFLOAD, stage, microbatch)
        _refuse(rank, action, "nothing loads it again", "Add its LOAD before the backward, or remove it")


def _refuse(rank: int, action: Action, why: str, remedy: str) -> NoReturn:
    raise ScheduleError(f"rank {rank}: {action}: {why}. {remedy}.")
