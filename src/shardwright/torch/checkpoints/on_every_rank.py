"""Work of all ranks that counts only where every rank has done it."""

from collections.abc import Callable
from typing import TypeVar

from shardwright.errors import CheckpointError
from shardwright.run.context import Context

__all__ = ["on_every_rank"]

_T = TypeVar("_T")


def on_every_rank(run: Context, make: Callable[[], _T]) -> _T:
    """Makes something on every rank, or on none if one rank cannot; collective over all ranks."""
    made: list[_T] = []
    problem = ""
    try:
        made.append(make())
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # of the script's own objects, or no memory for the copies
        problem = f"rank {run.rank}: {type(error).__name__}: {error}"
    first = next((each for each in run.from_all_ranks(problem) if each), None)
    if first is not None:
        raise CheckpointError(first)
    return made[0]
