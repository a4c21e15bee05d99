"""Data for replicas: each replica's samples, and seeds."""

import random
import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager

import torch
from torch.utils.data import DistributedSampler

from shardwright.torch.run.context import context, is_initialized

__all__ = ["distributed_sampler", "samplers_checked", "seed_everything"]


def distributed_sampler(
    dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> "DistributedSampler[int]":
    """A sampler that gives each replica its own part of a data set; ranks of one replica get the same part.

    Call ``sampler.set_epoch(epoch)`` before each epoch, so that it shuffles anew.

    Args:
        dataset: anything with a length.
        shuffle: in another order every epoch.
        seed: of the shuffling; the same on every rank.
        drop_last: leave out samples that do not fill all replicas; else some are given twice.
    """
    current = context()
    return DistributedSampler(
        dataset,  # type: ignore[arg-type]
        num_replicas=current.mesh.data,
        rank=current.data_rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


@contextmanager
def samplers_checked() -> Iterator[None]:
    """Warns of samplers that give every rank its own part, although ranks share the batch of a replica."""
    original = DistributedSampler.__iter__

    def iterate(self: "DistributedSampler[int]") -> Iterator[int]:
        _check(self)
        return original(self)

    DistributedSampler.__iter__ = iterate  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        DistributedSampler.__iter__ = original  # type: ignore[method-assign]


def _check(sampler: "DistributedSampler[int]") -> None:
    if not is_initialized():
        return
    current = context()
    mesh = current.mesh
    if current.rank == 0 and sampler.num_replicas == mesh.world_size and mesh.data < mesh.world_size:
        warnings.warn(
            f"a DistributedSampler cuts the data set in {sampler.num_replicas} parts, one for each rank, but "
            f"only {mesh.data} of them are trained on: ranks of a pipeline share the batch of their first. "
            "Use sw.distributed_sampler(dataset), which counts replicas.",
            stacklevel=3,
        )


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch: the same in a replica, another in each replica.

    Args:
        seed: any number from 0; replica r uses seed + r.
    """
    import numpy

    own = seed + context().data_rank
    random.seed(own)
    numpy.random.seed(own % 2**32)
    torch.manual_seed(own)
