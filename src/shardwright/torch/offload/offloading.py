"""The offload of one rank: its tier, and what is there of the batch that runs."""

import os
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from shardwright.run.context import Context
from shardwright.schedule import Action
from shardwright.torch._private import storage_key
from shardwright.torch.offload.disk import DiskTier
from shardwright.torch.offload.disk_folder import disk_folder
from shardwright.torch.offload.pinned import PinnedTier
from shardwright.torch.offload.stage_offload import Leaving, StageOffload
from shardwright.torch.offload.tier import Tier
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tensor_parallel.divided_tensor import local_of

__all__ = ["LEAST_BYTES", "Offloading", "lasting_storages", "offloading_of", "storages_of", "tier_for"]

LEAST_BYTES = 16 * 1024
"""Smaller storages stay: a copy of one costs more than it frees."""


class Offloading:
    """The offload of one rank."""

    def __init__(self, make_tier: Callable[[], Tier], *, horizon: int, least_bytes: int):
        self._make_tier = make_tier
        self._horizon = horizon
        self._least_bytes = least_bytes
        self._tier: Tier | None = None
        self._leaving = Leaving(horizon)
        self._stages: dict[tuple[int, int], StageOffload] = {}

    @property
    def waited_s(self) -> float:
        """Seconds for which this batch has waited for copies."""
        return sum(stage.waited_s for stage in self._stages.values())

    def reserve(self, num_bytes: int) -> None:
        """Makes sure of room for what all microbatches in flight offload."""
        if num_bytes:
            self._ready_tier().reserve(num_bytes)

    def begin_batch(self) -> None:
        """Forgets the batch before."""
        self.end_batch()
        self._stages.clear()

    def stage(self, stage: int, microbatch: int, needed: Callable[[], Collection[int]]) -> StageOffload:
        """Offloads what a stage keeps for a microbatch of this batch."""
        made = StageOffload(
            self._ready_tier(),
            self._leaving,
            horizon=self._horizon,
            least_bytes=self._least_bytes,
            needed=needed,
        )
        self._stages[stage, microbatch] = made
        return made

    def _ready_tier(self) -> Tier:
        if self._tier is None:
            self._tier = self._make_tier()
        return self._tier

    def end_batch(self) -> None:
        """Lets go of everything, also after a failure."""
        for stage in self._stages.values():
            stage.end()

    def copies(self) -> list[tuple[Action, float, float]]:
        """The copies of this batch with their begin and end, on `time.perf_counter`.

        They are made one by one; those in a row for one stage and microbatch are shown as one.
        """
        made = [
            (Action(kind, stage, microbatch), *copy.seconds())
            for (stage, microbatch), each in self._stages.items()
            for kind, copy in each.moved
        ]
        found: list[tuple[Action, float, float]] = []
        for action, row in groupby(sorted(made, key=lambda copy: copy[1]), key=lambda copy: copy[0]):
            copies = list(row)
            found.append((action, copies[0][1], copies[-1][2]))
        return found

    def close(self) -> None:
        """Gives the tier back."""
        self.begin_batch()
        if self._tier is not None:
            self._tier.close()
            self._tier = None


def offloading_of(context: Context) -> Offloading:
    """The offload of a rank: to a file where it computes on CPUs, else to pinned memory of its host.

    Call it while the rank is not pinned to its cores: the thread that copies may run on any.
    """
    horizon = context.config.activation_loading_horizon
    made = Offloading(partial(tier_for, context, _cores()), horizon=horizon, least_bytes=LEAST_BYTES)
    context.cleanup.callback(made.close)
    return made


def tier_for(context: Context, cores: set[int] | None = None) -> Tier:
    """A tier of a rank: nothing is taken before it is used."""
    if context.device.type != "cpu":
        return PinnedTier(context.device)
    return DiskTier(disk_folder(context.config, warns=context.rank == 0), cores=cores)


def _cores() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def storages_of(tensors: Iterable[Any]) -> set[int]:
    """The storages of the tensors among some objects, by `storage_key`; of parts, where ranks share them."""
    return {storage_key(local_of(tensor)) for tensor in tensors if isinstance(tensor, Tensor)}


def lasting_storages(model: nn.Module, arguments: Iterable[Any]) -> set[int]:
    """The storages that are there during a whole batch: of the model, and of what microbatches get."""
    return storages_of((*model.parameters(), *model.buffers(), *leaves(list(arguments))))
