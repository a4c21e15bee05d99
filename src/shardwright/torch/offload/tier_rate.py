"""Measures how fast a rank offloads what units keep, and gets it back, while all others of the host do."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwright.cluster import Cluster, Link
from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.torch.offload.offloading import tier_for
from shardwright.torch.offload.tier import Tier

__all__ = ["with_tier"]

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
