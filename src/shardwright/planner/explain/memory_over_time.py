"""The memory of each rank at every moment of a simulated step.

::

    bytes      ┌──┐  ┌──┐
            ┌──┘  └──┘  └──┐        activations: more at a forward, less at the end of a backward
    ────────┴──────────────┴──── ─  parameters, gradients, optimizer state, batch: all the time
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.plan import MemoryPrediction
from shardwright.schedule import Simulation, StageCost

__all__ = ["RankMemory", "memory_over_time"]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one pipeline rank during a step.

    Attributes:
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
    leaves `weight_bytes` until ``W`` ends. What is at the host is not there.
    """
    changes: list[list[tuple[float, int]]] = [[] for _ in memory]
    copied = {(copy.action.stage, copy.action.microbatch) for copy in simulation.copied}
    for event in (*simulation.events, *simulation.copied):
        stage, kind = event.action.stage, event.action.kind
        both = costs[stage].changes(kind, copied=(stage, event.action.microbatch) in copied)
        changes[event.rank] += zip((event.start_s, event.end_s), both, strict=True)
    moments = [_held(each) for each in changes]
    return tuple(
        RankMemory(
            rank,
            part.parameters_bytes + part.gradients_bytes + part.optimizer_bytes + part.batch_bytes,
            tuple(row),
        )
        for rank, (part, row) in enumerate(zip(memory, moments, strict=True))
    )


def _held(changes: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """What is held from each moment of a change on; at one moment, what goes makes room first."""
    row = [(0.0, 0)]
    for at_s, change in sorted(changes):
        if change:
            row.append((at_s, row[-1][1] + change))
    return row
