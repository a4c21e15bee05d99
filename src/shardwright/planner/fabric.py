"""Computes the part of the replicas' communication that hides behind a rank's compute.

::

    last backward   │ block 5 │ block 4 │ block 3 │
    sums                      ░░░░░ ░░░░░ ░░░░░ ░░░░  <- exposed: what is left when the backward has ended

Gradients are reduced bucket by bucket, each as soon as the last backward has filled it; rows of other hosts
are gathered in the order in which the first forward uses them. A core that copies messages computes nothing
meanwhile: that share of the hidden time is exposed too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster, HostCosts, Link
from shardwright.costs.calibration import ACTION_S, STEP_S
from shardwright.mesh import Mesh
from shardwright.placement import size_of_buckets
from shardwright.plan import TensorPrices
from shardwright.planner.layout import Layout

_MOST_BUCKET_BYTES = 25 * 2**20  # as users find it set


@dataclass(frozen=True, slots=True)
class Moment:
    """A tensor, with the computing that is on its far side.

    Attributes:
        seconds: of the last backward that are left when its gradient is complete, or of the first forward
            before its rows are used.
    """

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Moments:
    """The moments of the trained parameters of a rank.

    Attributes:
        gradients: when they are complete; of all.
        rows: when they are used; of those that replicas share.
    """

    gradients: list[Moment]
    rows: list[Moment]

    def slower(self, factor: float) -> "_Moments":
        """The same, where computing takes so many times as long."""
        if factor == 1:
            return self
        gradients, rows = (
            [Moment(moment.seconds * factor, moment.num_bytes) for moment in moments]
            for moments in (self.gradients, self.rows)
        )
        return _Moments(gradients, rows)

    @property
    def window_s(self) -> float:
        """Seconds of the backward for which some gradients are there already."""
        return max((moment.seconds for moment in self.gradients), default=0.0)


def moments_of(layout: Layout, *, splits: bool) -> list[_Moments]:
    """For each rank, its trained parameters beside what it computes.

    Of several stages of a rank, the lowest has the last backward and the first forward: what others use comes
    long before, and after.
    """
    chain = layout.chain
    slowness = np.asarray(layout.slowness or [1.0] * layout.num_ranks)
    times = slowness[list(layout.ranks)][layout.stage_of_call]
    again_s = np.where(layout.recompute, chain.column("recompute_s"), 0.0)
    forward_s = _until(chain.column("forward_s") * times)
    backward_s = _until(
        (chain.column("weight_s") if splits else chain.column("backward_s") + again_s) * times
    )
    rank_of = np.asarray(layout.ranks)[layout.stage_of_call].tolist()
    found = [_Moments([], []) for _ in range(layout.num_ranks)]
    for use, ranks in layout.holders():
        for rank in ranks if use.trained else ():
            lowest = min(layout.stages_of(rank))
            start, end = layout.cuts[lowest], layout.cuts[lowest + 1]
            first = min(end, next(call for call in use.calls if rank_of[call] == rank))
            found[rank].gradients.append(Moment(backward_s[first] - backward_s[start], use.num_bytes))
            if use.shared is not None and len(ranks) == 1:
                found[rank].rows.append(Moment(forward_s[first] - forward_s[start], use.num_bytes))
    return found


def exposed_after(moments: Sequence[Moment], total_s: float, *, occupancy: float) -> float:
    """Seconds by which sums of gradients make a step longer."""
    num_bytes = sum(moment.num_bytes for moment in moments)
    if not num_bytes or total_s <= 0:
        return 0.0
    size = size_of_buckets(num_bytes, most=_MOST_BUCKET_BYTES)
    end_s = float("-inf")  # counted from the end of the backward
    bucket = 0
    order = sorted(moments, key=lambda moment: -moment.seconds)
    for moment, following in zip(order, [*order[1:], None], strict=True):
        bucket += moment.num_bytes
        if following is None or bucket + following.num_bytes > size:
            end_s = max(end_s, -moment.seconds) + total_s * bucket / num_bytes
            bucket = 0
    return _with_copies(max(0.0, end_s), total_s, occupancy)


def exposed_before(moments: Sequence[Moment], total_s: float, *, occupancy: float) -> float:
    """Seconds by which gathering rows in the order of their use makes a step longer."""
    num_bytes = sum(moment.num_bytes for moment in moments)
    if not num_bytes or total_s <= 0:
        return 0.0
    arrived, late_s = 0, 0.0
    for moment in sorted(moments, key=lambda moment: moment.seconds):
        arrived += moment.num_bytes
        late_s = max(late_s, total_s * arrived / num_bytes - moment.seconds)
    return _with_copies(late_s, total_s, occupancy)


def _until(seconds: NDArray[np.float64]) -> list[float]:
    """Sums of what comes before each call, and of all."""
    sums: list[float] = np.concatenate(([0.0], np.cumsum(seconds))).tolist()
    return sums


def _with_copies(exposed_s: float, total_s: float, occupancy: float) -> float:
    exposed_s = min(exposed_s, total_s)
    return exposed_s + occupancy * (total_s - exposed_s)


@dataclass(frozen=True, slots=True)
class ReplicaSeconds:
    """The seconds that replicas spend on exchange in a step.

    Attributes:
        window_s: seconds of computing that can hide sums.
    """

    total_s: float
    exposed_s: float
    window_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds of it in which ranks compute."""
        return max(0.0, self.total_s - self.exposed_s)  # sums of the same seconds in another order


_USUAL = HostCosts(step_s=STEP_S, action_s=ACTION_S)

_NO_SUMS = ReplicaSeconds(0.0, 0.0, 0.0)
"""There is one replica."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """A cluster with a mesh laid over it; replica 0 represents all."""

    cluster: Cluster
    mesh: Mesh

    def link(self, source: int, target: int) -> Link:
        """The link between two pipeline ranks of a replica."""
        return self.cluster.link(self.mesh.rank_of(pp=source), self.mesh.rank_of(pp=target))

    @property
    def neighbour_link(self) -> Link | None:
        """The slowest link between consecutive pipeline ranks; None where there is one rank only."""
        links = [self.link(rank, rank + 1) for rank in range(self.mesh.pipeline - 1)]
        return max(links, key=lambda link: link.seconds(2**20), default=None)

    @property
    def host(self) -> Link | None:
        """The way from each rank to what is below its memory, for what is offloaded; None where not known."""
        host, cores = self.cluster.host, self.cluster.cores_per_node
        if host is None:
            return None
        spare = cores >= 2 * self._ranks_on_host
        return replace(host, occupancy=0.0) if spare else host

    @property
    def slowness(self) -> tuple[float, ...]:
        """For each pipeline rank, how many times as long it computes as costs say; empty: as long."""
        if not self.cluster.slowness:
            return ()
        mesh = self.mesh
        return tuple(
            max(self.cluster.slowness_of(mesh.rank_of(pp=p, rdp=d)) for d in range(mesh.data))
            for p in range(mesh.pipeline)
        )

    @property
    def ranks_per_node(self) -> int:
        """Pipeline ranks of one replica that share a host."""
        hosts = [
            self.mesh.rank_of(pp=rank) // self.cluster.ranks_per_node for rank in range(self.mesh.pipeline)
        ]
        return hosts.count(hosts[0])

    @property
    def cores(self) -> int:
        """CPU cores for the ranks of one replica on one host; 0 where every rank has a device of its own."""
        if not self.cluster.cores_per_node:
            return 0
        return max(1, self.cluster.cores_per_node * self.ranks_per_node // self._ranks_on_host)

    @property
    def crowding(self) -> float:
        """The factor on computing where the replicas of a host have less than a core each."""
        cores = self.cluster.cores_per_node
        return max(1.0, self._ranks_on_host / (cores * self.ranks_per_node)) if cores else 1.0

    @property
    def _ranks_on_host(self) -> int:
        """Ranks of all replicas that share a host."""
        return min(self.cluster.ranks_per_node, self.mesh.world_size)

    @property
    def host_costs(self) -> HostCosts:
        """What the library itself takes: less where each rank has all of the model."""
        found = self.cluster.host_costs if self.mesh.spreads_model else self.cluster.loop_costs
        return found or _USUAL

    @property
    def step_overhead_s(self) -> float:
        """Seconds that the runtime takes before the first action of a step and after the last one."""
        cores = self.cluster.cores_per_node
        crowd = max(1.0, self._ranks_on_host / cores) if cores else 1.0
        return crowd * self.host_costs.step_s

    @property
    def tensor_prices(self) -> TensorPrices:
        """What ranks of a tensor-parallel group pay, by the slowest of their links."""
        groups = self.mesh.groups("share")
        links = [self.cluster.link(first, other) for first, *others in groups for other in others]
        device = self.cluster.device
        return TensorPrices(
            latency_s=2 * max(link.latency_s for link in links) * math.log2(self.mesh.share),
            bandwidth_Bps=min(link.bandwidth_Bps for link in links),
            flops_per_s=device.flops_per_s * device.reached,
            memory_Bps=device.memory_Bps,
        )

    def all_reduce_seconds(self, num_bytes: float, ranks: Iterable[int], *, at_once: int = 1) -> float:
        """Seconds of summing `num_bytes` over world ranks, as a ring with a logarithmic latency.

        ``2 (n - 1) / n * bytes / bandwidth + 2 latency log2(n)`` over the slowest link.
        """
        members = sorted(ranks)
        n = len(members)
        if n < 2 or num_bytes <= 0:
            return 0.0
        links = [self.cluster.link(a, b) for a, b in zip(members, members[1:] + members[:1], strict=True)]
        slowest = max(links, key=lambda link: link.seconds(num_bytes / n))
        hosts = {rank // self.cluster.ranks_per_node for rank in members}
        shared = at_once if len(hosts) > 1 else 1
        transfer = 2 * (n - 1) / n * num_bytes / slowest.bandwidth_Bps * shared
        return transfer + 2 * slowest.latency_s * math.log2(n)

    def tie_seconds(self, layout: Layout) -> float:
        """Seconds of summing the gradients of parameters that several pipeline ranks hold, once a step."""
        groups: dict[tuple[int, ...], int] = {}
        replicated = layout.replicated()
        for use in layout.chain.parameters:
            if use.trained and use.name in replicated:
                ranks = tuple(sorted({layout.ranks[stage] for stage in replicated[use.name]}))
                groups[ranks] = groups.get(ranks, 0) + use.num_bytes
        return sum(
            self.all_reduce_seconds(size, [self.mesh.rank_of(pp=rank) for rank in ranks])
            for ranks, size in groups.items()
        )

    def update_gather_seconds(self, layout: Layout) -> float:
        """Seconds in which ranks that share updates gather what each has updated, once a step."""
        updates = max((use.updates for use in layout.chain.parameters), default=1)
        if updates == 1:
            return 0.0
        sizes = [apart + shared / self.mesh.shard for apart, shared in layout.trained_bytes()]
        groups = [
            self.mesh.group("dp_replicate", self.mesh.rank_of(pp=rank))[:updates]
            for rank in range(len(sizes))
        ]
        return max(map(self._replicas_seconds, sizes, groups)) / 2

    def replica_seconds(self, layout: Layout, *, splits: bool = False) -> "ReplicaSeconds":
        """Seconds of summing the gradients over the replicas, once a step, on the rank that waits longest."""
        if self.mesh.data == 1:
            return _NO_SUMS
        gatherings, trained = layout.gatherings(), layout.trained_bytes()
        of_ranks = [
            self._replica_seconds(rank, trained[rank], moments, layout.chain.reductions, gatherings[rank])
            for rank, moments in enumerate(moments_of(layout, splits=splits))
        ]
        return max(of_ranks, key=lambda each: (each.exposed_s, each.total_s))

    def _replica_seconds(
        self, rank: int, trained: tuple[int, int], moments: _Moments, reductions: int, gatherings: int
    ) -> "ReplicaSeconds":
        """The seconds of one pipeline rank."""
        first = self.mesh.rank_of(pp=rank)
        apart, shared = trained
        group, crowd = self.mesh.group("dp_shard", first), self.crowding
        moments = moments.slower(crowd)
        half_s = self._replicas_seconds(shared, group) / 2
        parts_s = self._replicas_seconds(shared / len(group), self.mesh.group("dp_replicate", first))
        sums_s = self._replicas_seconds(apart, self.mesh.group("rdp", first)) + half_s + parts_s
        early_s, gathers_s = (reductions - 1) * half_s, gatherings * half_s
        occupancy = self._occupancy(self.mesh.group("rdp", first))
        exposed_s = exposed_after(moments.gradients, sums_s, occupancy=occupancy) + early_s
        if gatherings == 1:
            exposed_s += exposed_before(moments.rows, half_s, occupancy=occupancy)
        else:  # they come in turns, as far ahead as there is room
            exposed_s += gathers_s
        total_s = sums_s + early_s + gathers_s
        return ReplicaSeconds(
            total_s=total_s, exposed_s=exposed_s, window_s=max(moments.window_s, total_s - exposed_s)
        )

    def _occupancy(self, ranks: Iterable[int]) -> float:
        """Share of a sum over ranks for which they cannot compute: cores add what is in shared memory."""
        hosts = {rank // self.cluster.ranks_per_node for rank in ranks}
        if len(hosts) > 1:
            return self.cluster.inter_node.occupancy
        return 1.0 if self.cluster.cores_per_node else self.cluster.intra_node.occupancy

    def _replicas_seconds(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a sum that all ranks of a host do at the same time, each in a group of its own kind."""
        hosts = [rank // self.cluster.ranks_per_node for rank in ranks]
        groups = self._ranks_on_host // hosts.count(hosts[0])
        return self.all_reduce_seconds(num_bytes, ranks, at_once=groups)
