"""Manual placement: ``with sw.partition(i):``.

It applies where `auto_partition` is false; everything else goes to `default_partition`. The innermost context
wins.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.errors import UsageError
from shardwright.run.context import context
from shardwright.tensorflow import _private

__all__ = ["partition", "rank_of"]

_PIN = "_shardwright_partition"
_OPEN: list[int] = []


@contextmanager
def partition(rank: int) -> Iterator[None]:
    """Places the layers that are created inside on a pipeline rank.

    Args:
        rank: pipeline rank, from 0.

    Raises:
        UsageError: there is no such pipeline rank.
    """
    pipeline = context().mesh.pipeline
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < pipeline:
        raise UsageError(
            f"partition {rank!r} does not exist: with {pipeline} pipeline ranks they are 0 to {pipeline - 1}."
        )
    if context().config.auto_partition:
        warnings.warn(
            "placement by hand changes nothing: auto_partition is true, so the planner places the layers. "
            "Set auto_partition to False and default_partition to the rank of all others, for example 0.",
            stacklevel=3,
        )
    _OPEN.append(rank)
    try:
        with _private.new_layers_told(_remember):
            yield
    finally:
        _OPEN.pop()


def rank_of(layer: Any) -> int | None:
    """The pipeline rank on which the user placed this very layer, if so."""
    rank: int | None = vars(layer).get(_PIN)
    return rank


def _remember(layer: Any) -> None:
    vars(layer).setdefault(_PIN, _OPEN[-1])  # of several contexts the innermost is told first
