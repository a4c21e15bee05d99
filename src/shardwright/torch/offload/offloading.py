"""The offload of one rank: its tier, what is there of the batch, and how fast it is."""

import logging
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.cluster import Cluster, Link
from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.schedule import Action
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.offload.disk import DiskTier, disk_folder
from shardwright.torch.offload.saved_storage import PinnedTier, Tier
from shardwright.torch.offload.stage_offload import Leaving, StageOffload
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tensor_parallel.divided_tensor import local_of

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
        """The copies of this batch with their begin and end, on `time.perf_counter`."""
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


log = logging.getLogger(__name__)

_BYTES, _COPIES = 4 * 2**20, 12  # of one copy, as a unit keeps; together more than caches hold
_RUNS = 3
_LATENCY_S = 2e-5  # of a copy of a few bytes, with what Python takes

# Where nothing is to be measured: a solid-state disk behind the kernel's cache, or PCI Express 4.
_DISK = Link(latency_s=_LATENCY_S, bandwidth_Bps=1e9, occupancy=1.0)
_PINNED = Link(latency_s=_LATENCY_S, bandwidth_Bps=20e9)


def with_tier(context: Context, cluster: Cluster) -> Cluster:
    """The machines with the way to where units may offload what they keep; collective.

    Where it is left to the planner whether they do, a tier that cannot be used is said once, and left out.
    """
    wanted = context.config.offload_activations
    if wanted is False:
        return cluster
    if context.config.profile == "estimated":
        return replace(cluster, host=_DISK if context.device.type == "cpu" else _PINNED)
    mine: tuple[float, float] | str
    try:
        mine = _measured(context)
    except UsageError as error:
        mine = str(error)
    found = context.from_all_ranks(mine)
    for rank, problem in enumerate(found):
        if isinstance(problem, str):
            if wanted is True:  # on all ranks, none of which waits for one that has gone
                raise UsageError(f"rank {rank}: {problem}" if len(found) > 1 else problem)
            log.warning("nothing is offloaded: rank %d: %s", rank, problem)
            return cluster
    return replace(cluster, host=_slowest([each for each in found if not isinstance(each, str)]))


def _slowest(found: Sequence[tuple[float, float]]) -> Link:
    return Link(
        latency_s=_LATENCY_S,
        bandwidth_Bps=min(bandwidth for bandwidth, _ in found),
        occupancy=max(occupancy for _, occupancy in found),
    )


def _measured(context: Context) -> tuple[float, float]:
    """Bytes a second in one direction, and the share of the time for which a core makes the copies."""
    if context.mesh.world_size > 1:
        dist.barrier()
    tier = tier_for(context)
    try:
        tries = [_one_run(context, tier) for _ in range(1 + _RUNS)][1:]  # the first takes room on the disk
    finally:
        tier.close()
    seconds, busy_s = (statistics.median(column) for column in zip(*tries, strict=True))
    occupancy = min(1.0, busy_s / seconds) if context.device.type == "cpu" else 0.0
    return 2 * _BYTES * _COPIES / seconds, occupancy


def _one_run(context: Context, tier: Tier) -> tuple[float, float]:
    """Seconds of copies to the tier and back, and those of them for which a core made copies."""
    memory = [torch.ones(_BYTES, dtype=torch.uint8, device=context.device) for _ in range(_COPIES)]
    wait: Callable[[], None] = (
        (lambda: None) if context.device.type == "cpu" else lambda: torch.cuda.synchronize(context.device)
    )
    wait()
    begin_s, process_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
    writes = [tier.write(each) for each in memory]
    for _, copy in writes:
        copy.wait()
    reads = [tier.read(place, each) for (place, _), each in zip(writes, memory, strict=True)]
    for copy in reads:
        copy.wait()
    wait()
    others_s = time.process_time() - process_s - (time.thread_time() - own_s)
    seconds = time.perf_counter() - begin_s
    for place, _ in writes:
        tier.free(place)
    return seconds, others_s
