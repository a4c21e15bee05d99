"""The peak memory of each rank: predicted beside measured, of the same things.

What a process uses has more in it than a plan predicts: the interpreter, libraries, data of the script. A
recorded step tells how much that is, so it is taken off::

    in use at the end of each action  -  in use after the step  +  parameters, gradients, optimizer state
                                      └── what was there beside the training ──┘

Temporaries of an operation are gone at the end of its action, so the prediction to compare with is that
without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.observe.report.gathered.measured import MeasuredTimeline
from shardwright.plan import MemoryPrediction

__all__ = ["MemoryRow", "memory_rows"]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The peak of one pipeline rank, in bytes; None where it is not known.

    Attributes:
        predicted: parameters, gradients, optimizer state and activations.
        measured: the same, at the end of the action where it was most.
    """

    rank: int
    predicted: float | None
    measured: float | None

    @property
    def difference(self) -> float | None:
        """measured - predicted."""
        if self.predicted is None or self.measured is None:
            return None
        return self.measured - self.predicted


def memory_rows(
    stack: Sequence[MemoryPrediction], timelines: Sequence[MeasuredTimeline], *, num_ranks: int
) -> tuple[MemoryRow, ...]:
    """The peak of every rank, in the recorded step where it was most."""
    measured: dict[int, float] = {}
    for timeline in timelines:
        for rank, other_bytes in timeline.other_bytes.items():
            peak = max((in_use for _, in_use in timeline.memory.get(rank, ())), default=0.0)
            if peak:
                measured[rank] = max(measured.get(rank, 0.0), peak - other_bytes)
    if not measured:
        return ()
    return tuple(
        MemoryRow(rank, _at_ends(stack[rank]) if stack else None, measured.get(rank))
        for rank in range(num_ranks)
    )


def _at_ends(memory: MemoryPrediction) -> float:
    return (
        memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.activations_bytes
    )
