"""Manual placement: ``with sw.partition(i):`` and ``sw.set_partition(module, i)``.

It applies where `auto_partition` is false; everything else goes to `default_partition`. The innermost setting
wins.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwright.errors import UsageError
from shardwright.run.context import context
from shardwright.run.planning import check_partition, point_out_auto_partition
from shardwright.torch.pytorch.modules import CreationWatch

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
    check_partition(rank)
    point_out_auto_partition(of="modules", stacklevel=4)
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
    check_partition(rank)
    if not isinstance(module, nn.Module):
        raise UsageError(f"set_partition takes an nn.Module, not a {type(module).__name__}.")
    point_out_auto_partition(of="modules", stacklevel=3)
    current = context()
    if current.model is not None and current.model.partitioned and current.mesh.pipeline > 1:
        raise UsageError("the model is placed already. Call set_partition before the first step.")
    _remember(module, rank)


def rank_of(module: nn.Module) -> int | None:
    """The pipeline rank on which the user placed this very module, if so."""
    rank: int | None = vars(module).get(_PIN)
    if rank is not None:
        check_partition(rank)
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
