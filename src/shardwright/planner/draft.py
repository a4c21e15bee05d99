"""One combination of schedule, stages and microbatches: a draft, timed in closed form; worked out, an option.

::

    make_draft:      split (chain DP) ─► improve ─► choose_keeping ─► closed-form time, for a first ranking
    Draft.work_out:  build_schedule ─► simulate ─► memory               the schedule that the runtime executes
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwright.plan import MemoryPrediction
from shardwright.planner.fabric import ReplicaSeconds
from shardwright.planner.layout import Layout
from shardwright.planner.rank_memory import Above, above_at_most, in_flight, rank_memory, scheduled_above
from shardwright.planner.workload import Workload, least_seconds
from shardwright.schedule import Kind, Schedule, Simulation, build_schedule, simulate, splits_backward


@dataclass(frozen=True, kw_only=True)
class Option:
    """A layout with its schedule, time and memory."""

    workload: Workload
    layout: Layout
    schedule: Schedule
    simulation: Simulation
    memory: tuple[MemoryPrediction, ...]

    @property
    def kind(self) -> str:
        return self.schedule.kind

    @property
    def num_microbatches(self) -> int:
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
        return self.workload.step_seconds(self.simulation.step_s, self.replica_s.exposed_s, self.layout)

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


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A layout with a schedule family, not simulated yet."""

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
            overhead_s=workload.fabric.host_costs.action_s,
            forward_overhead_s=workload.forward_overhead_s(layout),
        )
        return workload.step_seconds(step_s, sums_s.exposed_s, layout)

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
        above = above_at_most(layout, self.in_flight, num_microbatches=self.workload.num_microbatches)
        memory = self._memory(layout, activations, above)
        return max(part.peak_bytes for part in memory) - demands.limit_bytes

    def work_out(self) -> Option:
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
        self, layout: Layout, activation_bytes: Sequence[int], above: Sequence[Above]
    ) -> tuple[MemoryPrediction, ...]:
        workload = self.workload
        return rank_memory(
            layout,
            activation_bytes=activation_bytes,
            optimizer_factor=workload.demands.optimizer_factor,
            batch_bytes=workload.batch_bytes,
            above=above,
        )

    def _simulated(self, layout: Layout) -> Option:
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
            action_overhead_s=fabric.host_costs.action_s,
            forward_overhead_s=workload.forward_overhead_s(layout),
        )
        above = scheduled_above(schedule, layout, costs, simulation.unread)
        memory = self._memory(layout, simulation.peak_bytes, above)
        return Option(
            workload=workload, layout=layout, schedule=schedule, simulation=simulation, memory=memory
        )


def make_draft(
    workload: Workload,
    kind: str,
    ranks: tuple[int, ...],
    *,
    exposed: float = 1.0,
    heeds_speed: bool = True,
    cuts: tuple[int, ...] | None = None,
) -> Draft:
    """Cuts a chain for one placement of stages on ranks."""
    chain, demands = workload.chain, workload.demands
    flying = workload.in_flight(kind, ranks)
    if cuts is None:
        cuts = workload.cut(ranks, flying, exposed=exposed, heeds_speed=heeds_speed)
    layout = Layout(
        chain=chain,
        cuts=cuts,
        ranks=ranks,
        recompute=np.full(chain.num_calls, demands.recompute == "full"),
        slowness=workload.fabric.slowness,
        offload=np.full(chain.num_calls, True) if demands.offload is True else None,
        horizon=demands.horizon,
    )
    layout = workload.keeping_less(layout, flying)
    return Draft(workload=workload, kind=kind, layout=layout, in_flight=flying)
