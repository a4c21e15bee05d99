"""Counts the microbatches that a row has in flight."""

from collections.abc import Sequence

from shardwright.schedule.actions import Action, Kind

__all__ = ["most_in_flight"]


def most_in_flight(row: Sequence[Action]) -> int:
    """The largest number of microbatches that a rank has begun and not wholly done.

    A microbatch is done when every stage of the rank that ran its forward has run its ``B`` or its ``W``.

    >>> row = [Action(Kind(kind), 0, k) for kind, k in (("F", 0), ("F", 1), ("I", 0), ("F", 2), ("W", 0))]
    >>> most_in_flight(row)
    3
    """
    open_forwards: dict[int, int] = {}
    most = 0
    for action in row:
        k = action.microbatch
        if action.kind is Kind.FORWARD:
            open_forwards[k] = open_forwards.get(k, 0) + 1
            most = max(most, len(open_forwards))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            open_forwards[k] -= 1
            if not open_forwards[k]:
                del open_forwards[k]
    return most
