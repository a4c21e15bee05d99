"""Data for replicas: who reads what, and seeds."""

import random
from collections.abc import Sized

import torch
from torch.utils.data import DistributedSampler

from shardwright.torch.context import context

__all__ = ["distributed_sampler", "seed_everything"]


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
