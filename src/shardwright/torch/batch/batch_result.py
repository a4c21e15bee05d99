"""The result of one batch, as every engine returns it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shardwright.observe.timeline import Row
from shardwright.schedule import Action, Edge, Schedule
from shardwright.torch.batch.batch import Batch
from shardwright.torch.pytorch.tree import flatten

__all__ = ["BatchResult", "StepEngine", "detached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """One batch.

    Attributes:
        results: what the step function returned, by microbatch.
        losses: what was given to ``backward``, by microbatch; None for an evaluation.
        samples: in the batch of this replica.
        tokens: in the batch of this replica; None if it is not made of tokens.
        flops: of the model's forward for the batch; 0 where they were not counted.
        row: what this rank did, action by action.
        outside_s: seconds of operations that rest on no unit, and that every rank of a pipeline runs; part of
            `row`, in no profile, and predicted as the last run measured them.
        memory: bytes in use at the end of each of them; empty where nobody asked.
        host_copies: (action, start, end) of copies of what units keep to the host and back.
        schedule: the order of work; None where it is none that has a name.
        edges: transfers between stages, with bytes.
    """

    results: list[Any]
    losses: list[Tensor] | None
    samples: int
    tokens: int | None
    flops: float = 0.0
    row: Row = ()
    outside_s: float = 0.0
    memory: Sequence[int] = ()
    host_copies: Sequence[tuple[Action, float, float]] = ()
    schedule: Schedule | None = None
    edges: Sequence[Edge] = ()

    @property
    def pipeline_s(self) -> float:
        """Seconds from the first action of this rank to its last."""
        return self.row[-1][2] - self.row[0][1] if self.row else 0.0


class StepEngine(Protocol):
    """Runs a step function on the microbatches of a batch.

    Attributes:
        reduced: ids of the parameters whose gradients are reduced.
    """

    @property
    def reduced(self) -> set[int]: ...

    def run(self, function: Callable[..., Any], batch: Batch) -> BatchResult:
        """Collective over all ranks."""
        ...


def detached(tree: Any) -> Any:
    """The same tree with tensors that have no autograd history."""
    items, structure = flatten(tree)
    return structure.rebuild([item.detach() if isinstance(item, Tensor) else item for item in items])
