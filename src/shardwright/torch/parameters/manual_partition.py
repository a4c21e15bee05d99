"""Manual placement: ``with sw.partition(i):`` and ``sw.set_partition(module, i)``.

It applies where `auto_partition` is false; everything else goes to `default_partition`. The innermost setting
wins.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwright.errors import UsageError
from shardwright.run.context import context
from shardwright.torch.pytorch.module_creation import CreationWatch

__all__ = ["partition", "place_alike", "rank_of", "set_partition"]

_PIN = "_shardwright_partition"


@contextmanager
def partition(rank: int) -> Iterator[None]:
    """Places the modules that are created inside on a pipeline rank.

    Args:
        rank: pipeline rank, from 0.

    Raises:
        UsageError: there is no such pipeline rank.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> sw.init({"auto_partition": False, "default_partition": 0})
        >>> with sw.partition(0):
        ...     layer = torch.nn.Linear(2, 2)
        >>> sw.shutdown()
    """
    _check(rank)
    _point_out_auto_partition(stacklevel=4)
    with _CREATIONS.inside(rank):
        yield


def set_partition(module: nn.Module, rank: int) -> None:
    """Places a module and its content on a pipeline rank; call it before the first step.

    Args:
        module: any module of the model.
        rank: pipeline rank, from 0.

    Raises:
        UsageError: there is no such pipeline rank, or the model is placed already.
    """
    _check(rank)
    if not isinstance(module, nn.Module):
        raise UsageError(f"set_partition takes an nn.Module, not a {type(module).__name__}.")
    _point_out_auto_partition(stacklevel=3)
    current = context()
    if current.model is not None and current.model.partitioned and current.mesh.pipeline > 1:
        raise UsageError("the model is placed already. Call set_partition before the first step.")
    _remember(module, rank)


def rank_of(module: nn.Module) -> int | None:
    """The pipeline rank on which the user placed this very module, if so."""
    rank: int | None = vars(module).get(_PIN)
    if rank is not None:
        _check(rank)
    return rank


def place_alike(module: nn.Module, other: nn.Module) -> None:
    """Places a module, and what is inside it, where the user has placed another, if so."""
    rank: int | None = vars(other).get(_PIN)
    if rank is not None:
        for each in module.modules():
            _remember(each, rank)


def _remember(module: nn.Module, rank: int) -> None:
    # On the module itself, so that copies of it are placed as well.
    vars(module)[_PIN] = rank


_CREATIONS = CreationWatch(_remember)


def _point_out_auto_partition(*, stacklevel: int) -> None:
    if context().config.auto_partition:
        warnings.warn(
            "placement by hand changes nothing: auto_partition is true, so the planner places the modules. "
            "Set auto_partition to False and default_partition to the rank of all others, for example 0.",
            stacklevel=stacklevel,
        )


def _check(rank: int) -> None:
    pipeline = context().mesh.pipeline
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < pipeline:
        raise UsageError(
            f"partition {rank!r} does not exist: with {pipeline} pipeline ranks they are 0 to {pipeline - 1}."
        )
