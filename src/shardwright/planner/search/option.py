"""Works out one combination of schedule, stages and microbatches.

::

    Workload.draft:  split (chain DP) ─► improve ─► choose_keeping ─► closed-form time, for a first ranking
    Draft.work_out:  build_schedule ─► simulate ─► memory               the schedule that the runtime executes
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from shardwright.costs.own_runtime import ACTION_S
from shardwright.costs.partition import split
from shardwright.plan import MemoryPrediction
from shardwright.planner.chain.chain import Chain
from shardwright.planner.machines.fabric import Fabric, ReplicaSeconds
from shardwright.planner.memory.keeping import KeepingPolicy, choose_keeping
from shardwright.planner.memory.rank_memory import in_flight, rank_memory, scheduled_work_bytes
from shardwright.planner.partition.cuts import improve
from shardwright.planner.partition.layout import Layout
from shardwright.planner.partition.objective import (
    Objective,
    OffloadPolicy,
    RecomputePolicy,
    build_objective,
)
from shardwright.planner.partition.tables import build_tables
from shardwright.planner.search.lower_bound import least_seconds
from shardwright.schedule import Kind, Schedule, Simulation, build_schedule, simulate, splits_backward

__all__ = ["Demands", "Draft", "Option", "Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """The demands on every option.

    Attributes:
        limit_bytes: memory of one rank; 0 means no limit.
        memory_weight: share of memory in what is balanced.
        recompute: whether units are recomputed where memory requires it, never, or all.
        offload: whether units are offloaded where memory requires it, never, or all.
        horizon: units ahead of their backward that come back.
        active_microbatches: bound on microbatches in flight; None for the schedule's own.
        optimizer_factor: bytes of optimizer state for each byte of a trained parameter.
    """

    limit_bytes: int = 0
    memory_weight: float = 0.0
    recompute: RecomputePolicy = "auto"
    offload: OffloadPolicy = False
    horizon: int = 1
    active_microbatches: int | None = None
    optimizer_factor: float = 2.0


@lru_cache(maxsize=512)
def _flying(kind: str, ranks: tuple[int, ...], num_microbatches: int, active: int | None) -> tuple[int, ...]:
    """Microbatches in flight on each stage, by the order that the family takes for equal stages."""
    num_ranks = max(ranks) + 1
    if kind != "gpipe" and num_microbatches > 3 * num_ranks:
        # Steady after two rounds over the ranks; what is left of a last, short round changes the order.
        num_microbatches = 2 * num_ranks + num_microbatches % num_ranks
    schedule = build_schedule(
        kind, stage_ranks=ranks, num_microbatches=num_microbatches, active_microbatches=active
    )
    return in_flight(schedule)


class Workload:
    """A chain at one number of microbatches, on given machines; caches its results.

    Args:
        chain: the calls of one microbatch.
        num_microbatches: parts into which a batch is split.
        fabric: the machines.
        demands: what every option must respect.
    """

    def __init__(self, chain: Chain, *, num_microbatches: int, fabric: Fabric, demands: Demands):
        self.chain = chain
        self.num_microbatches = num_microbatches
        self.fabric = fabric
        self.demands = demands
        self._objectives: dict[float, Objective] = {}
        self._free_splits: dict[tuple[float, tuple[float, ...]], tuple[int, ...] | None] = {}

    def draft(
        self,
        kind: str,
        ranks: tuple[int, ...],
        *,
        exposed: float = 1.0,
        heeds_speed: bool = True,
        cuts: tuple[int, ...] | None = None,
    ) -> "Draft":
        """Cuts the chain for one placement of stages on ranks.

        Args:
            kind: schedule family.
            ranks: pipeline rank of each stage.
            exposed: share of the transfers that is taken as not hidden behind compute.
            heeds_speed: slower hosts get less; else it is cut as if all were alike.
            cuts: positions of the calls at which to cut, where the user has said so.

        Raises:
            PlanError: there are more stages than atoms.
        """
        demands = self.demands
        flying = _flying(kind, ranks, self.num_microbatches, demands.active_microbatches)
        if cuts is None:
            starts = self.chain.starts
            cuts = tuple(starts[cut] for cut in self._cut(ranks, flying, exposed, heeds_speed=heeds_speed))
        layout = Layout(
            chain=self.chain,
            cuts=cuts,
            ranks=ranks,
            recompute=np.full(self.chain.num_calls, demands.recompute == "full"),
            slowness=self.fabric.slowness,
            offload=np.full(self.chain.num_calls, True) if demands.offload is True else None,
            horizon=demands.horizon,
        )
        layout = self.keeping_less(layout, flying)
        return Draft(workload=self, kind=kind, layout=layout, in_flight=flying)

    def keeping_less(self, layout: Layout, in_flight: Sequence[int]) -> Layout:
        """The layout with units that keep less, where memory requires it and the settings allow it."""
        demands = self.demands
        return choose_keeping(
            layout,
            in_flight=in_flight,
            limit_bytes=demands.limit_bytes,
            policy=KeepingPolicy(
                recompute=demands.recompute == "auto",
                offload=demands.offload == "auto",
                host=self.fabric.host,
            ),
            optimizer_factor=demands.optimizer_factor,
            batch_bytes=self.batch_bytes,
        )

    @property
    def batch_bytes(self) -> int:
        """The tensors of a batch."""
        return self.chain.batch_bytes * self.num_microbatches

    def objective(self, exposed: float) -> Objective:
        """The costs of all stages."""
        if exposed not in self._objectives:
            demands = self.demands
            known = next(iter(self._objectives.values()), None)
            self._objectives[exposed] = build_objective(
                build_tables(self.chain) if known is None else known.tables,
                link=self.fabric.neighbour_link,
                exposed=exposed,
                memory_weight=demands.memory_weight,
                limit_bytes=max(1, demands.limit_bytes - 2 * self.batch_bytes) if demands.limit_bytes else 0,
                recompute=demands.recompute,
                offload=demands.offload,
                horizon=demands.horizon,
                host=self.fabric.host,
                optimizer_factor=demands.optimizer_factor,
            )
        return self._objectives[exposed]

    def _cut(
        self, ranks: tuple[int, ...], flying: Sequence[int], exposed: float, *, heeds_speed: bool
    ) -> tuple[int, ...]:
        objective = self.objective(exposed)
        num_atoms, num_stages = self.chain.num_atoms, len(ranks)
        several = num_stages > max(ranks) + 1
        slowness = self.fabric.slowness if heeds_speed else ()
        of_stages = tuple(slowness[rank] for rank in ranks) if slowness else (1.0,) * num_stages

        def key(cuts: tuple[int, ...]) -> tuple[float, ...]:
            return objective.rank_key(cuts, ranks=ranks, in_flight=flying, slowness=slowness)

        cuts = self._free_split(exposed, of_stages)
        if objective.memory_weight or not objective.fits(cuts, ranks=ranks, in_flight=flying):
            limited = split(
                num_atoms,
                num_stages=num_stages,
                cost_of_stage=lambda stage: objective.cost(flying[stage], of_stages[stage]),
            )
            several = several or limited is None
            cuts = limited or cuts
        return improve(cuts, key=key) if several else cuts

    def _free_split(self, exposed: float, slowness: tuple[float, ...]) -> tuple[int, ...]:
        """The fastest split where memory is no limit, for stages that take so many times as long."""
        known = self._free_splits.get((exposed, slowness))
        if known is None:
            free = replace(self.objective(exposed), limit_bytes=0, memory_weight=0.0)
            known = split(
                self.chain.num_atoms,
                num_stages=len(slowness),
                cost_of_stage=lambda stage: free.cost(1, slowness[stage]),
            )
            assert known is not None
            self._free_splits[exposed, slowness] = known
        return known


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A layout with a schedule family, not simulated yet.

    Attributes:
        workload: what it is made from.
        kind: schedule family.
        layout: where every call runs.
        in_flight: microbatches in flight, for each stage.
    """

    workload: Workload
    kind: str
    layout: Layout
    in_flight: tuple[int, ...]

    @cached_property
    def estimate_s(self) -> float:
        """Seconds of a step in closed form: ``m * slowest rank + bubble``, and the sums over ties.

        The bubble of p ranks with v stages each is ``(p - 1) * mean / v``, of which the zero-bubble
        families fill the part that their weight gradients can fill. What a backward in two parts takes more
        is left to the simulation: most of them stay whole.
        """
        layout = self.layout
        costs = layout.stage_costs()
        owner = np.asarray(layout.ranks)
        total = np.bincount(owner, [c.forward_s + c.seconds(Kind.BACKWARD) for c in costs])
        weight = np.bincount(owner, [c.weight_s for c in costs])
        host = self.workload.fabric.host
        if host is not None and layout.offloads:
            copies = np.bincount(owner, [2 * c.offload_bytes / host.bandwidth_Bps for c in costs])
            total = np.maximum(total + host.occupancy * copies, copies)
        idle = float(total.mean()) * layout.num_ranks / layout.num_stages
        if self.kind == "zb_h1":
            idle = max(0.0, idle - 2 * float(weight.mean()))
        elif self.kind == "zb_v":
            idle = 0.0
        m = self.workload.num_microbatches
        step_s = m * float(total.max()) + (layout.num_ranks - 1) * idle
        cores = self.workload.fabric.cores
        if cores:
            step_s = max(step_s, m * float(total.sum()) / cores)
        return step_s + self.workload.fabric.tie_seconds(layout)

    @property
    def least_s(self) -> float:
        """A lower bound on the seconds of a step, whatever its order of actions and its memory."""
        workload, layout = self.workload, self.layout
        sums_s = workload.fabric.replica_seconds(layout.with_recompute(range(layout.chain.num_calls)))
        layout = self._as_asked
        step_s = least_seconds(
            layout,
            num_microbatches=workload.num_microbatches,
            may_split=splits_backward(self.kind),
            overhead_s=ACTION_S,
        )
        return _whole_step_s(step_s, sums_s.exposed_s, layout, workload.fabric)

    @cached_property
    def overflow_bytes(self) -> int:
        """By how much the rank that needs most exceeds the limit, by an upper bound; 0 or less: it fits."""
        demands, layout = self.workload.demands, self.layout
        if not demands.limit_bytes:
            return 0
        activations = [0] * layout.num_ranks
        windows = [0] * layout.num_ranks
        for cost, flight, rank in zip(layout.stage_costs(), self.in_flight, layout.ranks, strict=True):
            activations[rank] += flight * cost.saved_bytes
            windows[rank] = max(windows[rank], cost.window_bytes + cost.tail_bytes * (flight > 1))
        activations = [sum(both) for both in zip(activations, windows, strict=True)]
        memory = self._memory(layout, activations)
        return max(part.peak_bytes for part in memory) - demands.limit_bytes

    def work_out(self) -> "Option":
        """Builds and simulates the schedule; chooses recomputation anew if that changes what is in flight."""
        option = self._simulated(self.layout)
        demands = self.workload.demands
        if not option.fits and "auto" in (demands.recompute, demands.offload):
            flying = in_flight(option.schedule)
            if flying != self.in_flight:
                option = self._simulated(self.workload.keeping_less(self._as_asked, flying))
        return option

    @property
    def keeps_less(self) -> bool:
        """Whether units are recomputed, or offloaded, as memory requires."""
        demands, layout = self.workload.demands, self.layout
        return bool(layout.recompute.any()) or (layout.offloads and demands.offload == "auto")

    @property
    def _as_asked(self) -> Layout:
        """The layout, in which nothing keeps less but what the settings ask for."""
        layout, demands = self.layout, self.workload.demands
        if demands.recompute == "auto":
            layout = layout.with_recompute(())
        return replace(layout, offload=None) if demands.offload == "auto" else layout

    def _memory(
        self, layout: Layout, activation_bytes: Sequence[int], work: Sequence[int] | None = None
    ) -> tuple[MemoryPrediction, ...]:
        workload = self.workload
        return rank_memory(
            layout,
            activation_bytes=activation_bytes,
            optimizer_factor=workload.demands.optimizer_factor,
            batch_bytes=workload.batch_bytes,
            work=work,
        )

    def _simulated(self, layout: Layout) -> "Option":
        workload = self.workload
        demands, fabric = workload.demands, workload.fabric
        costs = layout.stage_costs()
        schedule = build_schedule(
            self.kind,
            stage_ranks=layout.ranks,
            num_microbatches=workload.num_microbatches,
            active_microbatches=demands.active_microbatches,
            costs=costs,
        ).with_host_copies([stage for stage, cost in enumerate(costs) if cost.offload_bytes])
        simulation = simulate(
            schedule,
            costs,
            edges=layout.edges(),
            link=fabric.link,
            host=fabric.host,
            cores=fabric.cores,
            ranks_per_node=fabric.ranks_per_node,
            action_overhead_s=ACTION_S,
        )
        work = scheduled_work_bytes(schedule, layout, costs, simulation.unread)
        memory = self._memory(layout, simulation.peak_bytes, work)
        return Option(
            workload=workload, layout=layout, schedule=schedule, simulation=simulation, memory=memory
        )


@dataclass(frozen=True, kw_only=True)
class Option:
    """A layout with its schedule, time and memory.

    Attributes:
        workload: what it is made from.
        layout: where every call runs.
        schedule: the order of work, without transfers.
        simulation: its predicted timeline.
        memory: predicted peak of each pipeline rank.
    """

    workload: Workload
    layout: Layout
    schedule: Schedule
    simulation: Simulation
    memory: tuple[MemoryPrediction, ...]

    @property
    def kind(self) -> str:
        """Schedule family."""
        return self.schedule.kind

    @property
    def num_microbatches(self) -> int:
        """Parts into which a batch is split."""
        return self.schedule.num_microbatches

    @property
    def tie_s(self) -> float:
        """Seconds of summing the gradients of parameters that several pipeline ranks hold, once a step."""
        return self.workload.fabric.tie_seconds(self.layout)

    @property
    def settling_s(self) -> float:
        """Seconds in which tensor-parallel ranks settle the gradients of whole parameters, once a step."""
        return self.layout.settling_seconds()

    @cached_property
    def replica_s(self) -> ReplicaSeconds:
        """Seconds of summing the gradients over the replicas, once a step."""
        return self.workload.fabric.replica_seconds(self.layout, splits=self.schedule.splits_backward)

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step: the schedule, gradient reductions, and the work before and after."""
        return _whole_step_s(
            self.simulation.step_s, self.replica_s.exposed_s, self.layout, self.workload.fabric
        )

    @property
    def peak_bytes(self) -> int:
        """Memory of the rank that needs most."""
        return max(memory.peak_bytes for memory in self.memory)

    @property
    def overflow_bytes(self) -> int:
        """By how much the rank that needs most exceeds the limit; 0 or less: it fits."""
        limit = self.workload.demands.limit_bytes
        return self.peak_bytes - limit if limit else 0

    @property
    def fits(self) -> bool:
        """Every rank has enough memory."""
        return self.overflow_bytes <= 0


def _whole_step_s(schedule_s: float, sums_s: float, layout: Layout, fabric: Fabric) -> float:
    """Seconds of a step: the schedule, the sums of gradients, and what comes before and after."""
    sums_s += layout.settling_seconds()
    step_s = schedule_s * fabric.crowding + sums_s + fabric.tie_seconds(layout) + fabric.step_overhead_s
    return step_s * fabric.correction.factor
