"""The memory of each rank at every moment of a simulated step.

::

    bytes      ┌──┐  ┌──┐
            ┌──┘  └──┘  └──┐        activations: more at a forward, less at the end of a backward
    ────────┴──────────────┴──── ─  parameters, gradients, optimizer state, batch: all the time
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.plan import MemoryPrediction
from shardwright.schedule import Kind, Simulation, StageCost

__all__ = ["RankMemory", "memory_over_time"]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one pipeline rank during a step.

    Attributes:
        rank: pipeline rank.
        lasting_bytes: parameters, gradients, optimizer state and batch.
        moments: (seconds, bytes of activations from then on), in order of time; the first is at 0.
    """

    rank: int
    lasting_bytes: int
    moments: tuple[tuple[float, int], ...]

    @property
    def peak_activation_bytes(self) -> int:
        """The most that is kept for backwards."""
        return max(num_bytes for _, num_bytes in self.moments)


def memory_over_time(
    simulation: Simulation, costs: Sequence[StageCost], memory: Sequence[MemoryPrediction]
) -> tuple[RankMemory, ...]:
    """The memory of every rank.

    A forward keeps `saved_bytes` from its start to the end of its backward; of a backward in two parts, ``I``
    leaves `weight_bytes` until ``W`` ends.

    Args:
        simulation: the timeline.
        costs: of each stage.
        memory: of each pipeline rank, as predicted.
    """
    moments: list[list[tuple[float, int]]] = [[(0.0, 0)] for _ in memory]
    for event in simulation.events:
        cost, kind = costs[event.action.stage], event.action.kind
        later = cost.left_bytes
        change = {
            Kind.FORWARD: cost.saved_bytes,
            Kind.BACKWARD: -cost.saved_bytes,
            Kind.BACKWARD_INPUT: later - cost.saved_bytes,
            Kind.BACKWARD_WEIGHT: -later,
        }[kind]
        at_s = event.start_s if kind is Kind.FORWARD else event.end_s
        row = moments[event.rank]
        row.append((at_s, row[-1][1] + change))
    return tuple(
        RankMemory(rank, part.parameters + part.gradients + part.optimizer + part.batch, tuple(row))
        for rank, (part, row) in enumerate(zip(memory, moments, strict=True))
    )
