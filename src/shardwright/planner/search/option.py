"""A layout with its schedule: what it takes in time and memory."""

from dataclasses import dataclass
from functools import cached_property

from shardwright.plan import MemoryPrediction
from shardwright.planner.machines.fabric import ReplicaSeconds
from shardwright.planner.partition.layout import Layout
from shardwright.planner.search.workload import Workload
from shardwright.schedule import Schedule, Simulation

__all__ = ["Option"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A layout with its schedule, time and memory.

    Attributes:
        workload: what it is made from.
        schedule: the order of work, without transfers.
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
